"""Attention of new tokens over a cache."""

import numpy as np
import pytest

from kernels.cpu.attention import attention_forward
from kernels.cpu.decode_attention import decode_attention_forward
from tests.cases import ATTENTION, Attention
from tests.compare import (
    Arrays,
    assert_float32,
    assert_repeats,
    assert_same_bits,
    assert_within,
    normal,
    single,
    unwritten,
)


def inputs(case: Attention) -> Arrays:
    """Random arrays: the last third of a row is new, the rest is what the cache holds."""
    rng = np.random.default_rng(case[:5])
    qkv = normal(rng, case.batch, case.length, case.heads + 2 * case.kv_heads, case.head_dim)
    return {"qkv": qkv, "length": np.array(case.length * 2 // 3), "heads": np.array(case.heads)}


def run(a: Arrays) -> Arrays:
    """The cache has two rows more than are needed, and NaN wherever nothing was appended."""
    qkv, length, heads = a["qkv"], int(a["length"]), int(a["heads"])
    batch, context, total, head_dim = qkv.shape
    kv_heads = (total - heads) // 2
    keys = unwritten(qkv, batch, context + 2, kv_heads, head_dim)
    values = keys.copy()
    keys[:, :length], values[:, :length] = qkv[:, :length, heads:-kv_heads], qkv[:, :length, -kv_heads:]
    new = np.ascontiguousarray(qkv[:, length:])
    out = unwritten(qkv, batch, context - length, heads, head_dim)
    decode_attention_forward(out, new, keys, values, np.array(length, np.int32))
    return {"out": out, "keys": keys, "values": values}


def whole(a: Arrays) -> Arrays:
    """attention_forward over the whole row, its new tokens."""
    qkv, length, heads = a["qkv"], int(a["length"]), int(a["heads"])
    out = unwritten(qkv, *qkv.shape[:2], heads, qkv.shape[3])
    lse = unwritten(qkv, qkv.shape[0], heads, qkv.shape[1])
    attention_forward(out, lse, qkv, np.zeros(qkv.shape[:2], np.int32))
    return {"out": out[:, length:]}


# A new token that misses itself, sees a later one, or another head's keys: text that drifts away from the
# model's.
@pytest.mark.parametrize("case", ATTENTION)
def test_is_attention_over_the_whole_row(case: Attention) -> None:
    a = inputs(case)
    assert_within("out", run(a)["out"], whole(a)["out"], 1e-13)


# Keys appended to the wrong rows, or more of the cache overwritten than is new.
def test_cache_holds_the_row_and_nothing_else() -> None:
    a = inputs(ATTENTION[6])
    got, length = run(a), ATTENTION[6].length
    assert_within("keys", got["keys"][:, :length], a["qkv"][:, :, 4:5], 0)
    assert_within("values", got["values"][:, :length], a["qkv"][:, :, 5:], 0)
    assert np.isnan(got["keys"][:, length:]).all()
    assert np.isnan(got["values"][:, length:]).all()


# A sum or the exponential held in the wrong precision.
@pytest.mark.parametrize("case", ATTENTION)
def test_float32(case: Attention) -> None:
    assert_float32(run, inputs(case), case.length + case.head_dim, names=("out",))


# A scratch row that two threads share.
def test_same_bits_again_and_on_one_thread() -> None:
    assert_repeats(run, inputs(Attention(3, 33, 6, 3, 16, 0.0)))


# Rows of a batch that read each other's cache.
def test_rows_are_independent() -> None:
    a = single(inputs(ATTENTION[6]))
    both = run(a)
    for row in range(2):
        alone = run({**a, "qkv": a["qkv"][row : row + 1].copy()})
        assert_same_bits(alone, {name: both[name][row : row + 1].copy() for name in both})


# exp of an unshifted score overflows.
def test_large_scores() -> None:
    a = inputs(ATTENTION[6])
    a["qkv"][:, :, :5] *= 300
    assert_within("out", run(a)["out"], whole(a)["out"], 1e-9)
    assert np.isfinite(run(single(a))["out"]).all()
