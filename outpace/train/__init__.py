"""Training: heads, early exits and drafts for one target, on texts that the target wrote itself."""
