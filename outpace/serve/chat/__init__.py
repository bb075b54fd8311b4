"""Conversations to prompts, and text back to reasoning, content and tool calls."""
