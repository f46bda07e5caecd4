"""NVIDIA's driver library, for the calls that CuPy does not offer."""

import ctypes
from functools import cache


@cache
def driver() -> ctypes.CDLL:
    """libcuda; it is there wherever a GPU is."""
    return ctypes.CDLL("libcuda.so.1")
