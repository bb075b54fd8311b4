"""One file for each method: what it drafts, and its options."""
