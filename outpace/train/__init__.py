"""Training of heads and draft models."""
