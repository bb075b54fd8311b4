"""One file, one method: what it drafts and why."""
