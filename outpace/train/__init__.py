"""Training of heads and draft models on the target's own answers."""
