"""Transformers models through our attention function and our key-value cache."""
