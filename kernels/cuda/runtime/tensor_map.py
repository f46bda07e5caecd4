"""Tensor maps: Hopper's TMA loads and stores an array through them, one box per instruction.

A map has the array's address and extents. The driver makes it on the host, and kernels take it by value.
"""

import ctypes
from functools import cache
from typing import Any

import numpy as np

from kernels.cuda.runtime.driver import driver
from kernels.cuda.runtime.launch import BF16, TENSOR_MAP, Array

BOX_ROWS, BOX_COLUMNS = 64, 64  # a tile of hopper.cuh: 128 bytes per row
_ALIGNMENT = 64  # of the map itself
# CUtensorMap's enumerations in cuda.h. A box past the end of an extent is filled with zeros.
_BFLOAT16, _NO_INTERLEAVE, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, _ZEROS = 9, 0, 3, 3, 0


def heads_map(array: Array) -> Array:
    """The map of (B, T, heads, D) bf16, in boxes of BOX_ROWS positions and BOX_COLUMNS features of one head.

    Raises:
        ValueError: the driver rejects the map. The message has its status.
    """
    assert (
        array.dtype == BF16
        and array.ndim == 4
        and array.flags.c_contiguous
        and array.shape[3] % BOX_COLUMNS == 0
    )
    return _encode(array.data.ptr, array.shape)  # type: ignore[attr-defined]


@cache
def _encode(address: int, shape: tuple[int, ...]) -> Array:
    extents = shape[::-1]  # innermost first
    # Bytes, for all extents but the innermost.
    strides = np.cumprod(extents[:-1], dtype=np.uint64) * np.uint64(BF16.itemsize)
    memory = np.zeros(TENSOR_MAP.itemsize + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    encoded = memory[begin : begin + TENSOR_MAP.itemsize].view(TENSOR_MAP)
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(encoded.ctypes.data), _BFLOAT16, len(extents), ctypes.c_void_p(address),
        _c_array(ctypes.c_uint64, extents), _c_array(ctypes.c_uint64, strides),
        _c_array(ctypes.c_uint32, (BOX_COLUMNS, 1, BOX_ROWS, 1)),
        _c_array(ctypes.c_uint32, (1,) * len(extents)),
        _NO_INTERLEAVE, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, _ZEROS,
    )  # fmt: skip
    if status:
        raise ValueError(
            f"CUDA: cuTensorMapEncodeTiled failed with status {status} for an array {shape} at {address:#x}"
        )
    return encoded


def _c_array(kind: Any, values: Any) -> Any:
    return (kind * len(values))(*(int(value) for value in values))
