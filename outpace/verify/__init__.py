"""Proof that a model answers with the text of plain decoding, here or on a server."""
