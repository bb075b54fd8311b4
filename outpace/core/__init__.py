"""The loop, and the interfaces around it."""
