"""Texts to train on: the target's own answers."""
