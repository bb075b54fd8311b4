"""Storage on disk: the cache folder, atomic file writes, JSON lines, downloads and trained weights."""
