"""What drafting methods share: draft models, heads, trees, successor tables and layer searches."""
