"""Kernels in C for the CPU, called from JAX through its foreign function interface."""
