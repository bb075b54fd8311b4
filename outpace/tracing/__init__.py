"""Traces as a file, a page, in a terminal."""
