"""Runtimes: Transformers, compiled layers, CUDA graphs, GGUF."""
