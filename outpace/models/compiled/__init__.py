"""Compiled layers for CPUs, and CUDA graphs of compiled layers for GPUs."""
