"""Advise: which method will pay on this machine, for these prompts? Predicted from one recording, then measured."""
