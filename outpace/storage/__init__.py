"""Files on disk that are written whole or not at all: the cache folder, JSON lines, trained weights."""
