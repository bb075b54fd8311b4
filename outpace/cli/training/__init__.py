"""Commands that train, compress and export heads and drafts."""
