"""The same checks for servers with an OpenAI-compatible API."""
