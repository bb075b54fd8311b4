"""Kernels: attention, products and the choice of tokens, in Triton and C++."""
