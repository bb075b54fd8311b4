"""Trained heads and their file formats."""
