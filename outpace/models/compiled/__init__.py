"""Compiled layers for a CPU, and CUDA graphs of them for a GPU."""
