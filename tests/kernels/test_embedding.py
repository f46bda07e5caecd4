"""Token embedding, with and without learned positions."""

import numpy as np
import pytest

from kernels.cpu.embedding import embedding_backward, embedding_forward
from tests.cases import EMBEDDING, Embedding
from tests.compare import (
    Arrays,
    assert_accumulates,
    assert_float32,
    assert_gradients,
    assert_repeats,
    assert_within,
    documents,
    normal,
    unwritten,
)


def inputs(case: Embedding, position: bool = True) -> Arrays:
    """Random arrays; position_weight has two rows that no token reaches."""
    rng = np.random.default_rng(case.dim)
    arrays = {
        "weight": normal(rng, case.vocab_size, case.dim),
        "dout": normal(rng, case.batch * case.length, case.dim),
        "tokens": rng.integers(case.vocab_size, size=(case.batch, case.length), dtype=np.int32),
        "start": documents(rng, case.batch, case.length, case.documents),
    }
    return {**arrays, "position_weight": normal(rng, case.length + 2, case.dim)} if position else arrays


def run(a: Arrays, before: float = 0.0) -> Arrays:
    """Learned positions where the arrays have them."""
    out, dweight = unwritten(a["dout"]), np.full_like(a["weight"], before)
    dposition = np.full_like(a["position_weight"], before) if "position_weight" in a else None
    embedding_forward(out, a["tokens"], a["start"], a["weight"], a.get("position_weight"))
    embedding_backward(dweight, dposition, a["dout"], a["tokens"], a["start"])
    return {"out": out, "dweight": dweight, **({} if dposition is None else {"dposition_weight": dposition})}


# A token's row looked up by its place in the batch, or a position that does not start again with a document.
@pytest.mark.parametrize("case", EMBEDDING)
def test_forward_is_the_lookup(case: Embedding) -> None:
    a = inputs(case)
    position = np.arange(case.length) - a["start"]
    expected = (a["weight"][a["tokens"]] + a["position_weight"][position]).reshape(-1, case.dim)
    assert_within("out", run(a)["out"], expected, 0)
    without = {name: array for name, array in a.items() if name != "position_weight"}
    assert_within("out", run(without)["out"], a["weight"][a["tokens"]].reshape(-1, case.dim), 0)


# A column block or a repeated token left out of the sum.
@pytest.mark.parametrize("case", EMBEDDING)
def test_gradient(case: Embedding) -> None:
    assert_gradients(run, inputs(case), {"out": "dout"}, ("weight", "position_weight"))
    assert_gradients(run, inputs(case, position=False), {"out": "dout"}, ("weight",))


# A sum held in the wrong precision: a row is summed from as many rows as a token occurs.
@pytest.mark.parametrize("case", EMBEDDING)
def test_float32(case: Embedding) -> None:
    assert_float32(run, inputs(case), case.batch * case.length)


# Two threads that add to one token's row, or an order that depends on their number.
def test_same_bits_again_and_on_one_thread() -> None:
    assert_repeats(run, inputs(Embedding(3, 41, 200, 5, 0.1)))


# A tied head adds to the same gradient first, and earlier micro-batches did.
def test_gradients_accumulate() -> None:
    assert_accumulates(run, inputs(EMBEDDING[1]), ("dweight", "dposition_weight"))


# Tokens that don't occur and positions that aren't reached must not receive anything: padding rows stay zero.
def test_untouched_rows_stay_exactly_zero() -> None:
    a = inputs(EMBEDDING[4])
    got = run(a)
    unused = np.setdiff1d(np.arange(EMBEDDING[4].vocab_size), a["tokens"])
    assert len(unused)
    assert not got["dweight"][unused].any()
    assert not got["dposition_weight"][EMBEDDING[4].length :].any()
