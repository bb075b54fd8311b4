"""The KV cache of packed and compiled models: what slots keep of their texts, and where."""
