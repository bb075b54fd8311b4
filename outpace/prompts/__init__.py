"""Prompts for benchmarks and training."""
