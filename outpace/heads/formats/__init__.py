"""Files of heads, ours and those that others published."""
