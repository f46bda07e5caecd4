"""The engine: a transformer trained by hand-written operations."""

import os

# NumPy's matrix library lets its idle threads spin for some 20 ms after each product, on the cores that the Numba loops
# between two products need; 2^12 cycles leave them at once. Read when NumPy is first imported.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "12")
