"""Proof that answers equal plain decoding."""
