"""A matrix in 8-bit floating point, with one factor for all of it, and its transpose: what the products of FP8 read.

    e4m3: sign, 4 bits of exponent, 3 of mantissa, up to 448, no infinity     held as uint8
    e5m2: sign, 5 bits of exponent, 2 of mantissa, up to 57344                held as int8, which tells the two apart

Factors of a product are e4m3, gradients e5m2 (Micikevicius et al. 2022, arXiv:2209.05433). The CPU engine makes no product of
them; this is what the GPU's casts are held against.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# By the type that holds it: bits of the mantissa, exponent of the smallest normal number, the largest number, and to what a scale
# brings the largest magnitude: the next update's may be twice as large, of a gradient, whose format reaches further, 16 times.
FORMATS = {np.dtype(np.uint8): (3, -6, 448.0, 224.0), np.dtype(np.int8): (2, -14, 57344.0, 3584.0)}
# A largest magnitude below this is taken as this, so that a matrix of zeros has a factor, and a factor an inverse.
SMALLEST = np.float32(2.0**-100)


def fp8(
    out: Array | None, transposed: Array | None, scale: Array, most: Array | None, inp: Array, *, measure: bool
) -> None:
    """out = inp / scale, to nearest, ties to even; beyond the largest number that. What is not finite becomes NaN.

    Args:
        out:        (rows, columns) uint8 or int8, overwritten; or None.
        transposed: (columns, at least rows) of the same type, overwritten, zeros beyond the rows; or None.
        scale:      () fp32.
        most:       () int32, the bits of an fp32 number: becomes the largest magnitude of inp where that is larger; or None.
        inp:        (rows, columns), what bf16 holds.
        measure:    whether scale is overwritten with what inp's own largest magnitude asks for, or used as it is. It is not
            finite where an element is not, and then all is NaN.
    """
    dtype = next(array.dtype for array in (out, transposed) if array is not None)
    single = inp.astype(np.float32)
    largest = np.abs(single).max()
    if measure:
        scale[...] = _scale(largest, dtype)
    if most is not None:
        most[...] = max(most, largest.view(np.int32))  # in the order of the numbers, NaN above all
    code = _encoded(single * (np.float32(1) / np.float32(scale)) + (single - single), dtype)
    if out is not None:
        out[...] = code
    if transposed is not None:
        transposed[...] = 0
        transposed[:, : len(inp)] = code.T


def fp8_rescale(scales: Array, most: Array) -> None:
    """The scales of the next update's casts, from the largest magnitudes of this one's, which are forgotten.

    Args:
        scales: (products, 3, 4) fp32, of weight, input and gradient, each the first of four, as cuBLASLt takes a scale
            only at a multiple of 16 bytes: the last two overwritten where the magnitude is not 0.
        most:   (products, 2) int32, of input and gradient, as fp8 leaves them; zero afterwards.
    """
    for i, dtype in enumerate(FORMATS):
        for product in range(len(scales)):
            if most[product, i] > 0:
                scales[product, 1 + i, 0] = _scale(most[product, i : i + 1].view(np.float32)[0], dtype)
    most[...] = 0


def _scale(largest: np.float32, dtype: np.dtype[Any]) -> np.float32:
    return (SMALLEST if largest < SMALLEST else largest) / np.float32(FORMATS[dtype][3])  # type: ignore[no-any-return]


def _encoded(values: Array, dtype: np.dtype[Any]) -> Array:
    """The codes of fp32 numbers: they count the numbers of one sign in order, from 0."""
    mantissa, lowest, largest, _ = FORMATS[dtype]
    magnitude = np.minimum(np.abs(values), np.float32(largest))
    exponent = np.frexp(np.maximum(magnitude, 2.0**lowest))[1] - 1  # below 2^lowest numbers lie as close as above
    steps = np.rint(np.ldexp(magnitude, mantissa - exponent))  # 2^(mantissa + 1) of them are the next exponent's first number
    code = steps + (exponent - lowest) * 2**mantissa
    code = np.where(np.isnan(values), 127, code).astype(np.uint8)
    return (code | np.signbit(values).astype(np.uint8) << 7).view(dtype)
