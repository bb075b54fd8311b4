"""Training of what drafts: heads, early exits, small models. One loop, on a plain Transformers model."""
