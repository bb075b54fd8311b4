"""Bench: every method, plain decoding and Transformers' own loops on the same prompts, in one run (docs/bench.md)."""
