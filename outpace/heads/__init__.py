"""Trained heads that draft for a model, and their files."""
