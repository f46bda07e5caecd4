"""A matrix in 8-bit floating point, with one factor for all of it, and its transpose: what the products of FP8 read.

    e4m3: sign, 4 bits of exponent from 2^-6, 3 of mantissa, up to 448, no infinity (Micikevicius et al. 2022, arXiv:2209.05433)

Gradients too, as in DeepSeek-V3 (2024, arXiv:2412.19437), though e5m2 reaches further: kernels/NOTES.md. The CPU engine makes no
product of them; this is what the GPU's casts are held against.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MANTISSA, LOWEST, LARGEST = (
    3,
    -6,
    np.float32(448),
)  # bits; exponent of the smallest normal number; the largest number
TOP = np.float32(
    112
)  # to what a scale brings the largest magnitude: the next update's may be four times as large
# A largest magnitude below this is taken as this, so that a matrix of zeros has a factor, and a factor an inverse.
SMALLEST = np.float32(2.0**-100)


def fp8(
    out: Array, transposed: Array, scale: Array, most: Array | None, inp: Array, *, measure: bool
) -> None:
    """out = inp / scale, to nearest, ties to even; beyond the largest number that. What is not finite becomes NaN.

    Args:
        out:        (rows, columns) uint8, overwritten.
        transposed: (columns, at least rows) uint8, overwritten, zeros beyond the rows.
        scale:      () fp32.
        most:       () int32, the bits of an fp32 number: becomes the largest magnitude of inp where that is larger; or None.
        inp:        (rows, columns), what bf16 holds.
        measure:    whether scale is overwritten with what inp's own largest magnitude asks for, or used as it is. It is not
            finite where an element is not, and then every code times it is NaN.
    """
    single = inp.astype(np.float32)
    largest = np.abs(single).max()
    if measure:
        scale[...] = _scale(largest)
    if most is not None:
        most[...] = max(most, largest.view(np.int32))  # in the order of the numbers, NaN above all
    code = _encoded(single * (np.float32(1) / np.float32(scale)) + (single - single))
    out[...] = code
    transposed[...] = 0
    transposed[:, : len(inp)] = code.T


def fp8_rescale(scales: Array, most: Array, norm: Array) -> None:
    """The scales of the next update's casts, from the largest magnitudes of this one's, which are forgotten.

    A gradient whose norm is not finite is not applied: then both stay.

    Args:
        scales: (products, 3, 4) fp32, of weight, input and gradient, each the first of four, as cuBLASLt takes a scale
            only at a multiple of 16 bytes: the last two overwritten where the magnitude is not 0.
        most:   (products, 2) int32, of input and gradient, as fp8 leaves them; zero afterwards.
        norm:   () fp64, the gradient's.
    """
    if not np.isfinite(norm):
        return
    known = most > 0
    scales[:, 1:, 0][known] = _scale(most.view(np.float32)[known])
    most[...] = 0


def _scale(largest: Any) -> Any:
    return np.maximum(largest, SMALLEST) / TOP  # of NaN it is NaN


def _encoded(values: Array) -> Array:
    """The codes of fp32 numbers: they count the numbers of one sign in order, from 0."""
    magnitude = np.minimum(np.abs(values), LARGEST)
    exponent = (
        np.frexp(np.maximum(magnitude, 2.0**LOWEST))[1] - 1
    )  # below 2^LOWEST numbers lie as close as above
    steps = np.rint(
        np.ldexp(magnitude, MANTISSA - exponent)
    )  # 2^(MANTISSA + 1) of them are the next exponent's first number
    code = np.where(np.isnan(values), 127, steps + (exponent - LOWEST) * 2**MANTISSA)
    return code.astype(np.uint8) | np.signbit(values).astype(np.uint8) << 7
