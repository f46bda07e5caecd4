"""How tests compare arrays: bit by bit, with central differences, and within what a precision can give.

An operation is tested through a `run`: it takes arrays by name, calls forward and backward over outputs that
hold NaN, and returns everything they wrote; the gradient of `name` is `dname`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np

from tests.cases import Attention
from tests.gradient_check import FLOOR, LIMIT

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

# Largest relative error of one rounding, to nearest.
UNIT = {np.dtype(np.float32): 2.0**-24, np.dtype(np.float64): 2.0**-53}
# Roundings of an element besides those of its sums: products, quotients, roots and an exponential of about 4
# units.
ROUNDINGS = 16
# Elements of each tensor whose derivative is taken numerically, and the step of the differences.
ELEMENTS = 12
STEP = 2e-3


def normal(rng: np.random.Generator, *shape: int) -> Array:
    """Standard normal float64 numbers that float32 holds exactly, so that both precisions start from the
    same.
    """
    return rng.standard_normal(shape, np.float32).astype(np.float64)


def documents(rng: np.random.Generator, batch: int, length: int, probability: float) -> Array:
    """(batch, length) int32: the index at which each token's document begins, as
    kernels.engine.document_start gives it.
    """
    begins = rng.random((batch, length)) < probability
    begins[:, 0] = True
    return np.maximum.accumulate(np.where(begins, np.arange(length), 0), axis=1).astype(np.int32)


def attention_inputs(case: Attention) -> Arrays:
    """Random qkv and dout, and where documents begin."""
    rng = np.random.default_rng(case[:5])
    return {
        "qkv": normal(rng, case.batch, case.length, case.heads + 2 * case.kv_heads, case.head_dim),
        "dout": normal(rng, case.batch, case.length, case.heads, case.head_dim),
        "start": documents(rng, case.batch, case.length, case.documents),
    }


def single(arrays: Mapping[str, Array]) -> Arrays:
    """The arrays with float32 in place of float64."""
    return {name: a.astype(np.float32) if a.dtype == np.float64 else a.copy() for name, a in arrays.items()}


def from_fp8(codes: Array) -> Array:
    """The numbers in float64 that codes of e4m3 stand for."""
    bits = codes.astype(np.int64)
    exponent, fraction = bits >> 3 & 15, bits & 7
    magnitude = np.ldexp(np.where(exponent > 0, 8.0, 0) + fraction, np.maximum(exponent, 1) - 10)
    magnitude[bits & 0x7F == 0x7F] = np.nan
    return np.where(bits >> 7 == 1, -magnitude, magnitude)


def unwritten(like: Array, *shape: int) -> Array:
    """NaN in the precision of `like`, in its shape or another: an element that an operation forgets stays
    NaN.
    """
    return np.full(shape or like.shape, np.nan, like.dtype)


def assert_within(name: str, got: Array, expected: Array, tolerance: float) -> None:
    """No element differs by more than the tolerance, nor is NaN; the message names the worst."""
    assert got.shape == expected.shape, f"{name}: {got.shape}, expected {expected.shape}"
    error = np.abs(got.astype(np.float64) - expected)
    error = np.where(np.isnan(error), np.inf, error)
    where = np.unravel_index(int(np.argmax(error)), error.shape)
    text = f"{name}{[int(i) for i in where]}: {got[where]!r}, expected {expected[where]!r}"
    assert error[where] <= tolerance, f"{text}, off by {error[where]:.2e}, allowed {tolerance:.2e}"


def assert_same_bits(got: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Same names, shapes and precisions, and every bit."""
    assert got.keys() == expected.keys()
    for name, array in got.items():
        assert array.dtype == expected[name].dtype, name
        assert array.shape == expected[name].shape, name
        if array.tobytes() != expected[name].tobytes():
            count = int((array != expected[name]).sum())
            raise AssertionError(f"{name}: {count} of {array.size} elements differ")


def assert_calibrated(
    got: Mapping[str, Array], oracle: Mapping[str, Array], baseline: Mapping[str, Array], factor: float
) -> None:
    """The error of `got` is at most `factor` times that of a baseline of the same precision, tensor by
    tensor.

    The oracle is the same in float64; the baseline has the same roundings in another order. factor: 2, or 3
    where the order of sums differs.
    """
    assert got.keys() == oracle.keys() == baseline.keys()
    for name in got:
        error = np.abs(baseline[name].astype(np.float64) - oracle[name]).max()
        assert_within(name, got[name], oracle[name], factor * float(error))


def assert_float32(
    run: Callable[[Arrays], Arrays],
    arrays: Arrays,
    length: int,
    scale: Mapping[str, float] | None = None,
    names: Sequence[str] = (),
) -> None:
    """float32 gives what float64 gives, up to roundings: a sum of `length` terms and ROUNDINGS more, each of
    one unit.

    The largest element of a tensor stands for the magnitude of the terms that its elements are summed from;
    `scale` says otherwise, for a tensor whose terms cancel. `names` of the outputs, all by default.
    """
    got, oracle = run(single(arrays)), run(arrays)
    for name in names or oracle:
        assert got[name].dtype == np.float32, name
        magnitude = (scale or {}).get(name, float(np.abs(oracle[name]).max()))
        assert_within(
            name, got[name], oracle[name], UNIT[np.dtype(np.float32)] * (length + ROUNDINGS) * magnitude
        )


def assert_gradients(
    run: Callable[[Arrays], Arrays], arrays: Arrays, outputs: Mapping[str, str], wrt: Sequence[str]
) -> None:
    """The gradient of sum(output * its dout) by each of `wrt` is that of central differences of fourth order,
    in float64.

    outputs: the name of each output's gradient among the arrays, by the output's name.
    """
    gradients = {name: run(arrays)[f"d{name}"].reshape(-1) for name in wrt}
    rng = np.random.default_rng(len(arrays))

    def moved(element: Array, value: float) -> Arrays:
        element[...] = value
        return run(arrays)

    for name, gradient in gradients.items():
        # 1e-6: where a gradient vanishes, as that of a single token's probability, the differences are
        # rounding alone.
        flat, floor = arrays[name].reshape(-1), max(FLOOR * np.abs(gradient).max(), 1e-6)
        for index in rng.permutation(flat.size)[:ELEMENTS]:
            element = flat[index : index + 1].reshape(())
            origin, numeric = float(element), 0.0
            for steps, coefficient in ((1, 8 / 12), (2, -1 / 12)):
                plus, minus = moved(element, origin + steps * STEP), moved(element, origin - steps * STEP)
                for output, dout in outputs.items():
                    numeric += (
                        coefficient / STEP * float(((plus[output] - minus[output]) * arrays[dout]).sum())
                    )
            element[...] = origin
            allowed = LIMIT * max(abs(numeric), abs(gradient[index]), floor)
            assert abs(numeric - gradient[index]) <= allowed, (
                f"d{name}[{index}]: {gradient[index]}, differences {numeric}"
            )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Numba's loops on so many threads."""
    before = numba.get_num_threads()
    numba.set_num_threads(count)
    try:
        yield
    finally:
        numba.set_num_threads(before)


def assert_repeats(run: Callable[[Arrays], Arrays], arrays: Arrays) -> None:
    """The same bits at every call and with any number of threads, in float32."""
    inputs = single(arrays)
    with threads(numba.config.NUMBA_NUM_THREADS):
        first, second = run(inputs), run(inputs)
    with threads(1):
        alone = run(inputs)
    assert_same_bits(second, first)
    assert_same_bits(alone, first)


def assert_accumulates(run: Callable[..., Arrays], arrays: Arrays, names: Sequence[str]) -> None:
    """run(arrays, before=x), whose parameter gradients hold x at first, adds what run(arrays) gives to x."""
    zero, more = run(arrays), run(arrays, before=3.0)
    for name in names:
        tolerance = 4 * UNIT[np.dtype(np.float64)] * (3 + float(np.abs(zero[name]).max()))
        assert_within(name, more[name], zero[name] + 3.0, tolerance)
