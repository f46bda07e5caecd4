"""The cast to 8 bits on the CPU, which the GPU's is held against bit for bit."""

import numpy as np
import pytest

from kernels.cpu.fp8 import AMAX_TARGET, LARGEST, MANTISSA_BITS, fp8, fp8_rescale
from tests.compare import Array, from_fp8

ONE = np.ones((), np.float32)


def codes(values: Array) -> Array:
    """Of fp32 numbers, with a scale of 1."""
    out, transposed = np.empty((1, values.size), np.uint8), np.empty((values.size, 1), np.uint8)
    fp8(out, transposed, ONE.copy(), None, values.reshape(1, -1), measure=False)
    return out.reshape(values.shape)


# A wrong exponent, or numbers too small for one: each number of the format is its own nearest, but for -0.
def test_every_number_is_kept() -> None:
    every = np.arange(256, dtype=np.uint8)
    values = from_fp8(every)
    finite = np.isfinite(values)
    assert (finite.sum(), values[finite].max()) == (254, LARGEST)
    finite[128] = False
    assert np.array_equal(codes(values[finite]), every[finite])


# Rounding away from or towards zero, ties to odd, by one bit too early; what lies beyond the largest becoming
# infinite or NaN.
def test_rounds_to_nearest() -> None:
    numbers = from_fp8(np.arange(127, dtype=np.uint8))  # in order
    middles = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    assert np.array_equal(codes(middles) % 2, np.zeros(middles.size)), "a tie is not even"
    for toward, expected in ((-np.inf, numbers[:-1]), (np.inf, numbers[1:])):
        beside = np.nextafter(middles, np.float32(toward))
        assert np.array_equal(from_fp8(codes(beside)), expected)
        assert np.array_equal(from_fp8(codes(-beside)), -expected)
    beyond = np.array([LARGEST * 1.01, 1e30, -1e30], np.float32)
    assert from_fp8(codes(beyond)).tolist() == [LARGEST, LARGEST, -LARGEST]
    with np.errstate(invalid="ignore"):
        wrong = codes(np.array([np.nan, np.inf, -np.inf], np.float32))
    assert np.isnan(from_fp8(wrong)).all()


# A scale of another tensor's or of the signed maximum, a transposed copy with what was there before beyond
# the rows.
def test_scale_and_transposed() -> None:
    inp = np.random.default_rng(0).standard_normal((5, 16), np.float32)
    inp[2, 3] = -7
    out, transposed, scale = (
        np.empty(inp.shape, np.uint8),
        np.full((16, 16), 99, np.uint8),
        np.full((), np.nan, np.float32),
    )
    fp8(out, transposed, scale, None, inp, measure=True)
    assert scale == np.float32(7) / AMAX_TARGET
    assert np.array_equal(transposed[:, :5], out.T)
    assert not transposed[:, 5:].any()
    assert from_fp8(out)[2, 3] == -AMAX_TARGET
    assert np.abs(from_fp8(out) * scale - inp).max() <= 7 * 2.0 ** -(MANTISSA_BITS + 1)
    fp8(out, transposed, scale, None, inp / 2, measure=False)
    assert np.abs(from_fp8(out)).max() == AMAX_TARGET / 2


# A magnitude that a smaller one takes the place of, that outlives its update or makes another factor's scale;
# zeros' scale; an update that is not applied and leaves scales behind.
def test_scales_of_the_next_update() -> None:
    scales, most, out = (
        np.full((2, 3, 4), 5, np.float32),
        np.zeros((2, 2), np.int32),
        np.empty((1, 16), np.uint8),
    )
    for largest in (3.0, 6.0, 2.0):
        fp8(
            out,
            out.T.copy(),
            ONE.copy(),
            most[0, 0:1].reshape(()),
            np.array([[-largest, 1.0] * 8]),
            measure=False,
        )
    most[1, 1] = np.float32(112).view(np.int32)
    before = most.copy()
    fp8_rescale(scales, most, np.array(np.inf))
    assert (scales == 5).all()
    assert np.array_equal(most, before)
    fp8_rescale(scales, most, np.array(1.0))
    assert scales[:, :, 0].tolist() == [
        [5, np.float32(6) / AMAX_TARGET, 5],
        [5, 5, np.float32(112) / AMAX_TARGET],
    ]
    assert not most.any()


# Zeros that divide by zero; a number that is not finite and does not show in the product.
@pytest.mark.parametrize("measure", [True, False])
def test_zeros_and_what_is_not_finite(measure: bool) -> None:
    out, transposed, scale = (
        np.empty((2, 16), np.uint8),
        np.empty((16, 2), np.uint8),
        np.zeros((), np.float32),
    )
    fp8(out, transposed, scale, None, np.zeros((2, 16), np.float32), measure=True)
    assert 0 < scale < 1e-30
    assert not out.any()
    scale[...] = 1
    for wrong in (np.inf, -np.inf, np.nan):
        with np.errstate(invalid="ignore"):
            fp8(out, transposed, scale, None, np.array([[1.0, wrong] * 8] * 2, np.float32), measure=measure)
            assert np.isnan(from_fp8(out) * scale)[:, slice(None) if measure else slice(1, None, 2)].all()
