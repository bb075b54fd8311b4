"""Rules of acceptance beyond `match`."""
