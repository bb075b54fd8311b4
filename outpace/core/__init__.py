"""The loop: draft a tree, score it in one pass, keep what the target chose; and the nouns that it speaks in."""
