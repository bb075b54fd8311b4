"""Traces: what every pass did, on disk, as a page and in a terminal."""
