"""CPU kernels in C, called from JAX through its foreign function interface."""
