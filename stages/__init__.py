"""The pipeline: stages, the commands beside them, and what they are made of."""

import kernels as kernels  # first: it sets how NumPy's matrix library waits, before NumPy is imported
