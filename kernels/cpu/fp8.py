"""The cast of a matrix to FP8 with one scale, and the transposed cast: the operands of FP8 matmuls.

    e4m3: 1 sign bit, 4 exponent bits (smallest normal number 2^-6), 3 mantissa bits; up to 448; no infinity
    (Micikevicius et al. 2022, arXiv:2209.05433)

Gradients are cast to e4m3 too, as in DeepSeek-V3 (2024, arXiv:2412.19437). e5m2 has a wider range: see
kernels/NOTES.md. The CPU engine has no FP8 matmul. These functions are the reference for the GPU's casts.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Mantissa bits, exponent of the smallest normal number, and the largest number of e4m3.
MANTISSA, LOWEST, LARGEST = 3, -6, np.float32(448)
# A scale maps the largest magnitude to this. The next update's magnitudes may be four times as large.
TOP = np.float32(112)
# A smaller largest magnitude counts as this. So the scale of a matrix of zeros has a finite inverse.
SMALLEST = np.float32(2.0**-100)


def fp8(
    out: Array, transposed: Array, scale: Array, most: Array | None, inp: Array, *, measure: bool
) -> None:
    """out = inp / scale, rounded to nearest, ties to even, saturating. NaN and infinity become NaN.

    Args:
        out:        (rows, columns) uint8, overwritten.
        transposed: (columns, at least rows) uint8, overwritten; zeros beyond the rows.
        scale:      () fp32, read, or overwritten with measure.
        most:       () int32, the bits of an fp32 number: the largest magnitude so far. Raised to
                    that of inp. Or None.
        inp:        (rows, columns), values of bf16.
        measure:    True: current scaling, the scale comes from inp's largest magnitude. False: delayed
            scaling, the scale is given. With current scaling, one element that is not finite makes the scale
            and all products with it NaN.
    """
    inp_fp32 = inp.astype(np.float32)
    amax = np.abs(inp_fp32).max()
    if measure:
        scale[...] = _scale(amax)
    if most is not None:
        # The bits of non-negative floats have the order of the floats, with NaN above all.
        most[...] = max(most, amax.view(np.int32))
    # inp - inp is 0, or NaN if inp is not finite.
    code = _encode(inp_fp32 * (np.float32(1) / np.float32(scale)) + (inp_fp32 - inp_fp32))
    out[...] = code
    transposed[...] = 0
    transposed[:, : len(inp)] = code.T


def fp8_rescale(scales: Array, most: Array, norm: Array) -> None:
    """Delayed scaling: this update's largest magnitudes give the scales of the next update's casts.

    If the gradient norm is not finite, the update is skipped, and both arrays stay.

    Args:
        scales: (matmuls, 3, 4) fp32: the scales of weight, input and gradient. Each is the first of four
            elements, since cuBLASLt needs 16-byte alignment. Those of input and gradient are overwritten if
            their magnitude is not 0.
        most:   (matmuls, 2) int32: the largest magnitudes of input and gradient, reset to zero.
        norm:   () fp64, the gradient norm.
    """
    if not np.isfinite(norm):
        return
    recorded = most > 0
    scales[:, 1:, 0][recorded] = _scale(most.view(np.float32)[recorded])
    most[...] = 0


def _scale(amax: Any) -> Any:
    return np.maximum(amax, SMALLEST) / TOP  # NaN stays NaN


def _encode(values: Array) -> Array:
    """The e4m3 codes of fp32 numbers: the sign bit, then the magnitude's index among the e4m3 magnitudes."""
    magnitude = np.minimum(np.abs(values), LARGEST)
    # Subnormal numbers have the spacing of the smallest normal exponent.
    exponent = np.frexp(np.maximum(magnitude, 2.0**LOWEST))[1] - 1
    # The mantissa with its leading bit. A mantissa of 2^(MANTISSA + 1) carries into the code's exponent.
    mantissa = np.rint(np.ldexp(magnitude, MANTISSA - exponent))
    code = np.where(np.isnan(values), 127, mantissa + (exponent - LOWEST) * 2**MANTISSA)
    return code.astype(np.uint8) | np.signbit(values).astype(np.uint8) << 7
