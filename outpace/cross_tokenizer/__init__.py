"""Draft models with another vocabulary."""
