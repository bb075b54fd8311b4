"""Anthropic's messages."""
