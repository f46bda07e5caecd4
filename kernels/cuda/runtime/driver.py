"""NVIDIA's driver library, for calls that CuPy does not have."""

import ctypes
from functools import cache


@cache
def driver() -> ctypes.CDLL:
    """libcuda, which every machine with a GPU has."""
    return ctypes.CDLL("libcuda.so.1")
