"""The policy "auto": the cost of a pass, the acceptance of draft tokens, and the choice of tokens to verify."""
