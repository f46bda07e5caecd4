"""A matrix in 8-bit floating point, with one factor for all of it, and its transpose: what the products of FP8 read.

    e4m3: sign, 4 bits of exponent, 3 of mantissa, up to 448, no infinity     held as uint8
    e5m2: sign, 5 bits of exponent, 2 of mantissa, up to 57344                held as int8, which tells the two apart

Factors of a product are e4m3, gradients e5m2 (Micikevicius et al. 2022, arXiv:2209.05433). The CPU engine makes no product of
them; this is what the GPU's casts are held against.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# By the type that holds it: bits of the mantissa, exponent of the smallest normal number, the largest number.
FORMATS = {np.dtype(np.uint8): (3, -6, 448.0), np.dtype(np.int8): (2, -14, 57344.0)}
# A largest magnitude below this is taken as this, so that a matrix of zeros has a factor, and a factor an inverse.
SMALLEST = np.float32(2.0**-100)


def fp8(out: Array | None, transposed: Array | None, scale: Array, inp: Array, *, measure: bool) -> None:
    """out = inp / scale, to nearest, ties to even; beyond the largest number that; NaN stays.

    Args:
        out:        (rows, columns) uint8 or int8, overwritten; or None.
        transposed: (columns, at least rows) of the same type, overwritten, zeros beyond the rows; or None.
        scale:      () fp32: largest magnitude of inp / largest number. Not finite where an element is not, and then all is NaN.
        inp:        (rows, columns), what bf16 holds.
        measure:    whether scale is overwritten so, or used as it is: of a matrix that was measured before.
    """
    dtype = next(array.dtype for array in (out, transposed) if array is not None)
    if measure:
        largest = np.abs(inp).max()
        scale[...] = (SMALLEST if largest < SMALLEST else np.float32(largest)) / np.float32(FORMATS[dtype][2])
    code = _encoded(inp.astype(np.float32) * (np.float32(1) / np.float32(scale)), dtype)
    if out is not None:
        out[...] = code
    if transposed is not None:
        transposed[...] = 0
        transposed[:, : len(inp)] = code.T


def _encoded(values: Array, dtype: np.dtype[Any]) -> Array:
    """The codes of fp32 numbers: they count the numbers of one sign in order, from 0."""
    mantissa, lowest, largest = FORMATS[dtype]
    magnitude = np.minimum(np.abs(values), np.float32(largest))
    exponent = np.frexp(np.maximum(magnitude, 2.0**lowest))[1] - 1  # below 2^lowest numbers lie as close as above
    steps = np.rint(np.ldexp(magnitude, mantissa - exponent))  # 2^(mantissa + 1) of them are the next exponent's first number
    code = steps + (exponent - lowest) * 2**mantissa
    code = np.where(np.isnan(values), 127, code).astype(np.uint8)
    return (code | np.signbit(values).astype(np.uint8) << 7).view(dtype)
