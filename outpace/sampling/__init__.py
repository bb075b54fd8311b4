"""Sampling: from logits to the chosen token by processors, filters, and noise keyed by seed and position."""
