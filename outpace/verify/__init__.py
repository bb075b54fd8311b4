"""Checks that prove that a model, local or on a server, gives the same text as plain decoding."""
