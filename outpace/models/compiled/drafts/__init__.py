"""Drafts that a compiled model makes by itself: chains and trees, without the host between their levels."""
