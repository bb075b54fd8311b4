"""Traces: what every pass did, as a file, as an HTML page and in the terminal."""
