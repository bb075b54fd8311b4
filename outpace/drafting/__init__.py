"""What several methods share: draft models, heads, trees, tables of successors."""
