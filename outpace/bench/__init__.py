"""Benchmarks: methods compared side by side, as ratios within one run."""
