"""From logits to the target's token: processors, filters, and noise keyed by seed and position."""
