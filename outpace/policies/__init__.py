"""Draft policies, which decide how much to draft: fixed rules, learned rules, and the controller behind `auto`."""
