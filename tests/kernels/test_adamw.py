"""AdamW over flat arrays."""

from typing import Any

import numpy as np
import pytest

from kernels.cpu.adamw import adamw
from kernels.parameters import DECAYS, GROUP_SHIFT, GROUPS, MUON, ZERO_GRAD
from tests.compare import UNIT, Array, Arrays, assert_repeats, assert_same_bits, assert_within, normal, single

SEGMENT, SEGMENTS = 64, 9
CONSTANTS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1,
                             "grad_clip": 1.0, "lr_scales": (1.0, 1.0, 1.0, 1.0)}  # fmt: skip


def inputs() -> Arrays:
    """Random parameters and moments as after some steps; segments decay or not, and are cleared or not."""
    rng = np.random.default_rng(3)
    size = SEGMENT * SEGMENTS
    return {
        "params": normal(rng, size),
        "exp_avg": 0.1 * normal(rng, size),
        "exp_avg_sq": 0.01 * np.abs(normal(rng, size)),
        "grads": normal(rng, size),
        "flags": np.arange(SEGMENTS, dtype=np.uint8) % 4,
        "grad_norm": np.array(0.5),
        "lr": np.array(1e-2),
        "step": np.array(7),
    }


def run(a: Arrays, **constants: Any) -> Arrays:
    """One update of copies."""
    params, exp_avg, exp_avg_sq, grads = (
        a[name].copy() for name in ("params", "exp_avg", "exp_avg_sq", "grads")
    )
    norm, lr = a["grad_norm"].astype(np.float64), a["lr"].astype(np.float64)
    c = {**CONSTANTS, **constants}
    adamw(params, exp_avg, exp_avg_sq, grads, None, a["flags"], norm, lr, a["step"], **c)
    return {"params": params, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def paper(a: Arrays, clip: float = 1.0, **constants: float) -> Arrays:
    """Algorithm 2 of the paper line by line, in float64: the decay acts on the parameters before the step."""
    c = {**CONSTANTS, **constants}
    g, t, lr = a["grads"] * clip, int(a["step"]), float(a["lr"])
    m = c["beta1"] * a["exp_avg"] + (1 - c["beta1"]) * g
    v = c["beta2"] * a["exp_avg_sq"] + (1 - c["beta2"]) * g**2
    m_hat, v_hat = m / (1 - c["beta1"] ** t), v / (1 - c["beta2"] ** t)
    decay = (np.repeat(a["flags"], SEGMENT) & DECAYS) * c["weight_decay"] * a["params"]
    return {
        "params": a["params"] - lr * (m_hat / (np.sqrt(v_hat) + c["eps"]) + decay),
        "exp_avg": m,
        "exp_avg_sq": v,
    }


def largest(array: Array) -> float:
    """The largest magnitude."""
    return float(np.abs(array).max())


# eps inside the root, a decay of the moments (L2 instead of AdamW), or a bias correction with the wrong
# power.
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_is_the_paper(step: int) -> None:
    a = {**inputs(), "step": np.array(step)}
    expected = paper(a)
    for name, got in run(a).items():
        assert_within(name, got, expected[name], 1e-14 * largest(expected[name]))
    # float32: about ten roundings of each term.
    for name, got in run(single(a)).items():
        assert_within(
            name, got, expected[name], 10 * UNIT[np.dtype(np.float32)] * (1 + largest(expected[name]))
        )


# Without bias correction the first step is a tenth of the learning rate; with it, whatever the gradient's
# size, all of it.
def test_first_step_has_the_length_of_the_learning_rate() -> None:
    a = single(
        {
            **inputs(),
            "step": np.array(1),
            "exp_avg": np.zeros(SEGMENT * SEGMENTS),
            "exp_avg_sq": np.zeros(SEGMENT * SEGMENTS),
        }
    )
    a["grads"] *= np.geomspace(1e-4, 1, SEGMENT * SEGMENTS, dtype=np.float32)
    # Where sqrt(1 - beta2) |g| is far above eps; a thousandth of the rate besides.
    moved = (run(a, weight_decay=0.0)["params"] - a["params"])[np.abs(a["grads"]) > 1e-4]
    assert_within("step", np.abs(moved), np.full_like(moved, 1e-2), 1e-5)
    np.testing.assert_array_equal(np.sign(moved), -np.sign(a["grads"][np.abs(a["grads"]) > 1e-4]))


# Norms and biases that decay towards zero.
def test_decay_acts_where_it_should() -> None:
    a = {**inputs(), "grads": np.zeros(SEGMENT * SEGMENTS), "exp_avg": np.zeros(SEGMENT * SEGMENTS)}
    got, decays = run(a)["params"], np.repeat(a["flags"], SEGMENT) & DECAYS > 0
    np.testing.assert_array_equal(got[~decays], a["params"][~decays])
    assert_within("params", got[decays], a["params"][decays] * (1 - 1e-2 * 0.1), 1e-15)


# The rate of one group for another's, or a decay that does not follow the group's rate.
def test_each_group_has_its_rate() -> None:
    a, scales = inputs(), (1.0, 3.0, 0.5, 0.0)
    group = np.arange(SEGMENTS) % len(GROUPS)
    a["flags"] = (DECAYS | group << GROUP_SHIFT).astype(np.uint8)
    got = run(a, lr_scales=scales)["params"]
    for number, scale in enumerate(scales):
        own = np.repeat(group == number, SEGMENT)
        expected = paper({**a, "lr": a["lr"] * scale})["params"][own]
        assert_within(GROUPS[number], got[own], expected, 1e-14 * largest(expected))


# A gradient longer than the threshold that isn't shortened, one below it that is, or the clip's sense turned
# round.
@pytest.mark.parametrize(
    ("norm", "grad_clip", "factor"), [(4.0, 1.0, 0.25), (4.0, 8.0, 1.0), (4.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_clipping(norm: float, grad_clip: float, factor: float) -> None:
    a = {**inputs(), "grad_norm": np.array(norm)}
    expected = paper(a, clip=factor)
    for name, got in run(a, grad_clip=grad_clip).items():
        assert_within(name, got, expected[name], 1e-14 * largest(expected[name]))


# Padding is zero in every array; 0 / (0 + eps) must leave it so, or padding rows of the vocabulary would
# grow.
def test_padding_stays_zero() -> None:
    a = single(inputs())
    for name in ("params", "exp_avg", "exp_avg_sq", "grads"):
        a[name][100:140] = 0
    for array in run(a).values():
        assert not array[100:140].any()


# A segment whose elements two threads share.
def test_same_bits_again_and_on_one_thread() -> None:
    assert_repeats(run, inputs())


# A gradient that the next update adds to, one that is cleared for nothing, or an element that is cleared
# before it is used.
def test_gradient_is_cleared() -> None:
    a = {**inputs(), "compute_weights": np.full(SEGMENT * SEGMENTS, np.nan, np.float32)}
    params, before, scalars = a["params"], a["grads"].copy(), (a["flags"], a["grad_norm"], a["lr"], a["step"])
    adamw(params, a["exp_avg"], a["exp_avg_sq"], a["grads"], a["compute_weights"], *scalars, **CONSTANTS)
    assert_same_bits(
        {"grads": a["grads"]}, {"grads": np.where(np.repeat(a["flags"], SEGMENT) & ZERO_GRAD, 0, before)}
    )
    # The weights that products read lag behind by an update, or are never written.
    assert_same_bits(
        {"compute_weights": a["compute_weights"]}, {"compute_weights": params.astype(np.float32)}
    )


# A matrix that both optimizers move, or compute weights that are rounded before Muon has moved the matrix.
def test_muons_segments_stay() -> None:
    a = {**inputs(), "compute_weights": np.full(SEGMENT * SEGMENTS, np.nan)}
    flat = ("params", "exp_avg", "exp_avg_sq", "grads", "compute_weights")
    results = []
    for flags in (a["flags"], a["flags"] | MUON * (np.arange(SEGMENTS) % 3 == 1).astype(np.uint8)):
        b = {name: array.copy() for name, array in a.items()}
        arrays = (*(b[name] for name in flat), flags, *(b[name] for name in ("grad_norm", "lr", "step")))
        adamw(*arrays, **CONSTANTS)
        results.append(b)
    muons = np.repeat(np.arange(SEGMENTS) % 3 == 1, SEGMENT)
    assert_same_bits(results[1], {**a, **{name: np.where(muons, a[name], results[0][name]) for name in flat}})


# One update by a gradient that overflowed spoils every parameter; one that clears it hides the tensor at
# fault.
@pytest.mark.parametrize("norm", [np.nan, np.inf])
def test_nothing_changes_where_the_norm_is_not_finite(norm: float) -> None:
    a = {**inputs(), "compute_weights": np.ones(SEGMENT * SEGMENTS), "grad_norm": np.array(norm)}
    before = {name: array.copy() for name, array in a.items()}
    arrays = (
        a[name]
        for name in (
            "params",
            "exp_avg",
            "exp_avg_sq",
            "grads",
            "compute_weights",
            "flags",
            "grad_norm",
            "lr",
            "step",
        )
    )
    adamw(*arrays, **CONSTANTS)
    assert_same_bits(a, before)
