"""Files on disk, written whole; trained weights."""
