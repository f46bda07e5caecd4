"""The CUDA engine's operations: hand-written kernels, and the library's or our own product."""
