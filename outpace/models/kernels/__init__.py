"""Kernels for attention, linear layers and token sampling, in Triton and C++."""
