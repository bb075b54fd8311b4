"""Traces: what every pass did, on disk and on screen."""
