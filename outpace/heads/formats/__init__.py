"""File formats of heads: import from and export to those of other projects."""
