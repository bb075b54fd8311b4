"""Transformers models, run with our attention function and key-value cache."""
