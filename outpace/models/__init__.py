"""Runtimes that execute a model's forward passes: Transformers, compiled layers, CUDA graphs, GGUF."""
