"""From logits to the chosen token."""
