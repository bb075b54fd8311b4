"""Verifiers beyond `match`: residual, typical, tiered and contrastive."""
