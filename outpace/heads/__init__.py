"""Trained heads that draft for a target model, and their file formats."""
