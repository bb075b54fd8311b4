"""Benchmarks: methods side by side, as ratios of one run."""
