"""Which method pays on your prompts."""
