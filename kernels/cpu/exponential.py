"""An exponential that vectorises. (Numba's own calls a scalar library routine for each element.)"""

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

LOG2_E = np.float32(1.4426950408889634)
# ln 2 as a sum of two parts. The first has few bits: k * LN2_HIGH is exact, and x - k ln 2 stays accurate
# (Cody and Waite 1980).
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
HALF = np.float32(0.5)
ONE = np.float32(1.0)
LOWEST, HIGHEST = np.float32(-87.3), np.float32(88.7)
# Polynomial coefficients of (exp(f) - 1 - f) / f^2 on |f| <= ln(2) / 2. The fit minimises the largest
# relative error of exp: 3e-9 before rounding.
C0, C1, C2 = np.float32(0.49999993), np.float32(0.16666521), np.float32(0.04166839)
C3, C4 = np.float32(0.00836871), np.float32(0.00138146)
SHIFT, EXPONENT_BIAS = np.int32(23), np.int32(127)


def exp(x: Any) -> Any:
    """exp(x) of a fp32 or fp64 scalar, in the argument's precision.

    fp32: with k = round(x / ln 2) and f = x - k ln 2, exp(x) = 2^k exp(f). A polynomial of degree 6 gives
    exp(f); k becomes the exponent field of a float. The code has no branch and no table, so a loop over it
    vectorises. The relative error is below 3e-7. Arguments below -87.3 give about 1e-38 instead of 0;
    arguments above 88.3 give infinity. NaN stays NaN.

    fp64: the library's exponential, for the gradient check.
    """
    return _exp_fp32(x) if isinstance(x, np.float32) else _exp_fp64(x)


def _exp_fp32(x: Any) -> Any:
    clamped = x if x > LOWEST else (LOWEST if x <= LOWEST else x)
    clamped = HIGHEST if clamped > HIGHEST else clamped
    k = np.floor(clamped * LOG2_E + HALF)
    f = clamped - k * LN2_HIGH
    f = f - k * LN2_LOW
    p = C4 * f + C3
    p = p * f + C2
    p = p * f + C1
    p = p * f + C0
    p = p * f * f + f + ONE
    return p * np.int32((np.int32(k) + EXPONENT_BIAS) << SHIFT).view(np.float32)


def _exp_fp64(x: Any) -> Any:
    return math.exp(x)


@overload(exp, inline="always")
def _exp_compiled(x: Any) -> Any:
    if x == types.float32:
        return _exp_fp32
    return _exp_fp64
