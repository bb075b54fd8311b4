"""A draft with another tokenizer than the target's: what tokens spell, which ones both have, and how to follow."""
