"""The same proof for servers that speak OpenAI's protocol."""
