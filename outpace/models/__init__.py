"""Adapters: each makes one kind of model an `LM`."""
