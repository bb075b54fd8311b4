"""Advice from traces: which method pays for your texts, and gates for Graft."""
