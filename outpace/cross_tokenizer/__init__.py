"""Draft models with a different vocabulary than the target's."""
