"""Runtimes that run a model for the loop: Transformers, compiled layers, CUDA graphs, GGUF."""
