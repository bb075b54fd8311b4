"""Further rules by which drafted tokens are accepted."""
