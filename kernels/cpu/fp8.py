"""The cast of a matrix to FP8 with one scale, and the transposed cast: the operands of FP8 matmuls.

    e4m3: 1 sign bit, 4 exponent bits (smallest normal number 2^-6), 3 mantissa bits; up to 448; no infinity
    (Micikevicius et al. 2022, arXiv:2209.05433)

Gradients are cast to e4m3 too, as in DeepSeek-V3 (2024, arXiv:2412.19437). e5m2 has a wider range: see
kernels/NOTES.md. The CPU engine has no FP8 matmul. These functions are the reference for the GPU's casts.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MANTISSA_BITS, MIN_EXPONENT, LARGEST = 3, -6, np.float32(448)
# A scale maps the largest magnitude to this. The next update's magnitudes may then be four times as large.
AMAX_TARGET = np.float32(112)
# A smaller largest magnitude counts as this. So the scale of a matrix of zeros has a finite inverse.
MIN_AMAX = np.float32(2.0**-100)


def fp8(
    out: Array, transposed: Array, scale: Array, amax: Array | None, inp: Array, *, measure: bool
) -> None:
    """out = inp / scale, rounded to nearest, ties to even, saturating. NaN and infinity become NaN.

    Args:
        out:        (rows, columns) uint8, overwritten.
        transposed: (columns, at least rows) uint8, overwritten; zeros beyond the rows.
        scale:      () fp32, read, or overwritten with measure.
        amax:       () int32, the bits of an fp32 number: the largest magnitude so far. Raised to
                    that of inp. Or None.
        inp:        (rows, columns), values of bf16.
        measure:    True: current scaling, the scale comes from inp's largest magnitude. False: delayed
            scaling, the scale is given. With current scaling, one element that is not finite makes the scale
            and all products with it NaN.
    """
    inp_fp32 = inp.astype(np.float32)
    largest = np.abs(inp_fp32).max()
    if measure:
        scale[...] = _scale(largest)
    if amax is not None:
        # The bits of non-negative floats have the order of the floats, with NaN above all.
        amax[...] = max(amax, largest.view(np.int32))
    # inp - inp is 0, or NaN if inp is not finite.
    code = _encode(inp_fp32 * (np.float32(1) / np.float32(scale)) + (inp_fp32 - inp_fp32))
    out[...] = code
    transposed[...] = 0
    transposed[:, : len(inp)] = code.T


def fp8_rescale(scales: Array, amax: Array, grad_norm: Array) -> None:
    """Delayed scaling: this update's largest magnitudes give the scales of the next update's casts.

    If the gradient norm is not finite, the update is skipped, and both arrays stay.

    Args:
        scales: (matmuls, 3, 4) fp32: the scales of weight, input and gradient. Each is the first of four
            elements, since cuBLASLt needs 16-byte alignment. Those of input and gradient are overwritten if
            their magnitude is not 0.
        amax:   (matmuls, 2) int32: the largest magnitudes of input and gradient, reset to zero.
        grad_norm: () fp64, the gradient norm.
    """
    if not np.isfinite(grad_norm):
        return
    recorded = amax > 0
    scales[:, 1:, 0][recorded] = _scale(amax.view(np.float32)[recorded])
    amax[...] = 0


def _scale(largest: Any) -> Any:
    return np.maximum(largest, MIN_AMAX) / AMAX_TARGET  # NaN stays NaN


def _encode(values: Array) -> Array:
    """The e4m3 codes of fp32 numbers: the sign bit, then the magnitude's index among the e4m3 magnitudes."""
    magnitude = np.minimum(np.abs(values), LARGEST)
    # Subnormal numbers have the spacing of the smallest normal exponent.
    exponent = np.frexp(np.maximum(magnitude, 2.0**MIN_EXPONENT))[1] - 1
    # The mantissa with its leading bit. A mantissa of 2^(MANTISSA_BITS + 1) carries into the code's exponent.
    mantissa = np.rint(np.ldexp(magnitude, MANTISSA_BITS - exponent))
    code = np.where(np.isnan(values), 127, mantissa + (exponent - MIN_EXPONENT) * 2**MANTISSA_BITS)
    return code.astype(np.uint8) | np.signbit(values).astype(np.uint8) << 7
