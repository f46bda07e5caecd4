"""Softmax and cross-entropy over a padded vocabulary."""

from typing import Any

import numpy as np
import pytest

from kernels.cpu.cross_entropy import cross_entropy_backward, cross_entropy_forward
from tests.cases import CROSS_ENTROPY
from tests.compare import (
    Arrays,
    assert_calibrated,
    assert_float32,
    assert_gradients,
    assert_repeats,
    assert_same_bits,
    assert_within,
    normal,
    single,
    unwritten,
)


def inputs(rows: int, vocab_size: int, padded: int) -> Arrays:
    """Random arrays; the padding's logits are NaN, which no result may show."""
    rng = np.random.default_rng([rows, vocab_size])
    logits = 3 * normal(rng, rows, padded)
    logits[:, vocab_size:] = np.nan
    return {
        "logits": logits,
        "targets": rng.integers(vocab_size, size=rows, dtype=np.int32),
        "weight": np.abs(normal(rng, rows)),
        "vocab_size": np.array(vocab_size),
    }


def run(a: Arrays, filled: bool = True) -> Arrays:
    """`correct` holds `filled` at first; nll_again is the backward pass's."""
    rows = len(a["targets"])
    sizes: dict[str, Any] = {"vocab_size": int(a["vocab_size"]), "softcap": float(a.get("softcap", 0))}
    nll, again, dlogits = unwritten(a["logits"], rows), unwritten(a["logits"], rows), a["logits"].copy()
    correct = np.full(rows, filled)
    cross_entropy_forward(nll, correct, a["logits"].copy(), a["targets"], **sizes)
    cross_entropy_backward(dlogits, again, a["targets"], a["weight"], **sizes)
    return {"nll": nll, "correct": correct, "nll_again": again, "dlogits": dlogits}


def plain(a: Arrays) -> Arrays:
    """The same from the definition, in the precision of the arrays."""
    rows, vocab_size = np.arange(len(a["targets"])), int(a["vocab_size"])
    logits = a["logits"][:, :vocab_size]
    shifted = logits - logits.max(axis=1, keepdims=True)
    nll = np.log(np.exp(shifted).sum(axis=1)) - shifted[rows, a["targets"]]
    dlogits = np.zeros_like(a["logits"])
    dlogits[:, :vocab_size] = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    dlogits[rows, a["targets"]] -= 1
    correct = logits[rows, a["targets"]] == logits.max(axis=1)
    return {"nll": nll, "correct": correct, "nll_again": nll, "dlogits": dlogits * a["weight"][:, None]}


# A padding column that takes part, whose NaN would then be everywhere; a loss in bits; a target off by one.
@pytest.mark.parametrize("shape", CROSS_ENTROPY)
def test_is_the_definition(shape: tuple[int, int, int]) -> None:
    a = inputs(*shape)
    got, expected = run(a), plain(a)
    for name in ("nll", "nll_again", "dlogits"):
        assert_within(name, got[name], expected[name], 1e-13 * (1 + np.abs(expected[name]).max()))
    assert not got["dlogits"][:, shape[1] :].any()
    for filled in (True, False):
        np.testing.assert_array_equal(run(a, filled)["correct"], expected["correct"])


# A weight that scales the softmax but not the target's 1, or the other way round.
@pytest.mark.parametrize("shape", CROSS_ENTROPY[:4:2])
def test_gradient(shape: tuple[int, int, int]) -> None:
    a = inputs(*shape)
    a["logits"][:, shape[1] :] = 0  # differences need numbers; the derivative by a padding column is zero
    assert_gradients(run, a, {"nll": "weight"}, ("logits",))


# A cap on the gradient's side only, a slope at the logit instead of the capped one, or at the wrong token.
@pytest.mark.parametrize("softcap", [2.0, 15.0])
@pytest.mark.parametrize("shape", CROSS_ENTROPY[:4:2])
def test_softcap(shape: tuple[int, int, int], softcap: float) -> None:
    a = inputs(*shape) | {"softcap": np.array(softcap)}
    capped = a | {"logits": softcap * np.tanh(a["logits"] / softcap)}
    for name, expected in plain(capped).items():
        if name != "dlogits":
            assert_within(name, run(a)[name], expected, 1e-13 * (1 + np.abs(expected).max()))
    a["logits"][:, shape[1] :] = 0
    assert_gradients(run, a, {"nll": "weight"}, ("logits",))


# A sum or the exponential held in the wrong precision. nll is the difference of the logits' own magnitude.
@pytest.mark.parametrize("shape", CROSS_ENTROPY)
def test_float32(shape: tuple[int, int, int]) -> None:
    a = inputs(*shape)
    size = 2 * float(np.abs(a["logits"][:, : shape[1]]).max())
    scale = {"nll": size, "nll_again": size, "dlogits": float(a["weight"].max())}
    assert_float32(run, a, shape[1], scale, ("nll", "nll_again", "dlogits"))


# As exact as the definition computed in the same precision; the sums run in another order.
def test_error_is_that_of_the_definition() -> None:
    a = inputs(64, 509, 512)
    got, oracle, baseline = run(single(a)), plain(a), plain(single(a))
    for arrays in (got, oracle, baseline):
        del arrays["correct"]
    assert_calibrated(got, oracle, baseline, 3)


# A row that two threads share.
def test_same_bits_again_and_on_one_thread() -> None:
    assert_repeats(run, inputs(67, 61, 128))


# exp of an unshifted logit overflows at 89 in float32: the loss of a confident model would be infinite or
# NaN.
def test_huge_logits() -> None:
    logits = np.array([[1e4, -1e4, 0, 0], [-1e30, 1e30, 0, 0], [88.9, 88.9, 88.9, 0]])
    targets = np.array([1, 1, 0], np.int32)
    a = {"logits": logits, "targets": targets, "weight": np.ones(3), "vocab_size": np.array(3)}
    for arrays in (a, single(a)):
        got = run(arrays)
        assert_within("nll", got["nll"], np.array([2e4, 0, np.log(3)]), 1e-6)
        expected = np.array([[1, -1, 0, 0], [0, 0, 0, 0], [-2 / 3, 1 / 3, 1 / 3, 0]])
        assert_within("dlogits", got["dlogits"], expected, 1e-6)


# A masked position that adds to the gradient: training on the user's words.
def test_row_of_weight_zero_has_no_gradient() -> None:
    a = single(inputs(17, 61, 128))
    a["weight"][[0, 5, 16]] = 0
    got = run(a)
    assert not got["dlogits"][[0, 5, 16]].any()
    assert got["dlogits"][1].any()
    assert_same_bits({"nll": got["nll_again"]}, {"nll": got["nll"]})


# Among equal logits each is the likeliest; accuracy would depend on the order of the vocabulary otherwise.
def test_a_tie_is_correct() -> None:
    logits = np.array([[2.0, 5, 5, 1, 9], [2.0, 5, 5, 1, 9], [2.0, 5, 5, 1, 9], [3, 3, 3, 3, 9]])
    a = {
        "logits": logits,
        "targets": np.array([1, 2, 0, 3], np.int32),
        "weight": np.ones(4),
        "vocab_size": np.array(4),
    }
    assert run(single(a))["correct"].tolist() == [True, True, False, True]
