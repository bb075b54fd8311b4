"""Advice: which method pays on your prompts, and Graft's gates tuned from traces."""
