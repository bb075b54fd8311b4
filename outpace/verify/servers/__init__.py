"""The same proof for servers with an OpenAI-compatible API."""
