"""Methods side by side, as ratios."""
