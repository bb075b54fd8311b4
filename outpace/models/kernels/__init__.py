"""Triton kernels of the GPU path, each behind an operator that `torch.compile` and CUDA graphs take as it is."""
