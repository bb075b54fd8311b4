"""What methods share: draft models, heads, trees, tables of successors, searches for layers."""
