"""The trace viewer: an HTML page and a terminal view."""
