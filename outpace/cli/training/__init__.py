"""Commands that train, compress and export heads and draft models."""
