"""The trace viewer: a trace as one HTML page, or in the terminal (outpace show)."""
