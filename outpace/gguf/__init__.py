"""GGUF models, run by llama.cpp: what people run on CPUs and laptops."""
