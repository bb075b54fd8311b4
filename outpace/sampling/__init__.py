"""From logits to the target's token: processors, filters, and noise that depends on the seed and the position alone."""
