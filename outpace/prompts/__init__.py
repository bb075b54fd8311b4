"""Prompts for benchmarks and for training."""
