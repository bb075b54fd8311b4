"""Jobs: who runs when, and what comes of it."""
