"""The loop: draft, score in one pass, keep what the target chose; and the nouns that it speaks in."""
