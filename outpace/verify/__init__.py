"""Checks that a model, here or on a server, gives the same text as plain decoding."""
