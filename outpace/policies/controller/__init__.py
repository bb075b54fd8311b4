"""The policy "auto": what a pass costs here, how likely a draft token is, and which of them to verify."""
