"""Traces as a page and in a terminal."""
