"""Training of heads and drafts, on the target's own answers."""
