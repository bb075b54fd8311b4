"""Training data: the target's own answers."""
