"""Causal grouped-query attention."""

import numpy as np
import pytest

from kernels.cpu.attention import attention_backward, attention_forward
from tests.cases import ATTENTION, Attention
from tests.compare import (
    Array,
    Arrays,
    assert_calibrated,
    assert_float32,
    assert_gradients,
    assert_repeats,
    assert_same_bits,
    assert_within,
    attention_inputs,
    single,
    unwritten,
)


def run(a: Arrays, dbias: Array | None = None) -> Arrays:
    """Forward and backward."""
    batch, length, heads, _ = a["dout"].shape
    out, lse, dqkv = unwritten(a["dout"]), unwritten(a["dout"], batch, heads, length), unwritten(a["qkv"])
    attention_forward(out, lse, a["qkv"], a["start"])
    attention_backward(dqkv, a["dout"], out, lse, a["qkv"], a["start"], dbias)
    return {"out": out, "lse": lse, "dqkv": dqkv}


def split(a: Arrays) -> tuple[Array, Array, Array, Array]:
    """q, k and v (B, H, T, D), keys and values repeated for the heads that share them, and the mask (B, 1, T,
    T).
    """
    heads, length = a["dout"].shape[2], a["dout"].shape[1]
    kv_heads = (a["qkv"].shape[2] - heads) // 2
    turned = a["qkv"].transpose(0, 2, 1, 3)
    q, k, v = np.split(turned, [heads, heads + kv_heads], axis=1)
    index = np.arange(length)
    seen = (index <= index[:, None]) & (index >= a["start"][:, :, None])
    return q, k.repeat(heads // kv_heads, axis=1), v.repeat(heads // kv_heads, axis=1), seen[:, None]


def dense(a: Arrays) -> Arrays:
    """The same by a whole masked softmax, in the precision of the arrays."""
    q, k, v, seen = split(a)
    score = np.where(seen, q @ k.swapaxes(2, 3) / np.sqrt(q.dtype.type(q.shape[-1])), -np.inf)
    largest = score.max(axis=-1, keepdims=True)
    lse = np.log(np.exp(score - largest).sum(axis=-1, keepdims=True)) + largest
    p, dout = np.exp(score - lse), a["dout"].transpose(0, 2, 1, 3)
    out = p @ v
    ds = (
        p
        * (dout @ v.swapaxes(2, 3) - (dout * out).sum(axis=-1, keepdims=True))
        / np.sqrt(q.dtype.type(q.shape[-1]))
    )
    batch, heads, length, head_dim = q.shape
    shared = (batch, -1, heads // ((a["qkv"].shape[2] - heads) // 2), length, head_dim)
    dk, dv = ((x.swapaxes(2, 3) @ y).reshape(shared).sum(axis=2) for x, y in ((ds, q), (p, dout)))
    dqkv = np.concatenate((ds @ k, dk, dv), axis=1)
    return {"out": out.transpose(0, 2, 1, 3), "lse": lse[..., 0], "dqkv": dqkv.transpose(0, 2, 1, 3)}


# A wrong mask, scale, or key head of a query head; also lse, which another implementation must be able to
# read.
@pytest.mark.parametrize("case", ATTENTION)
def test_is_a_dense_masked_softmax(case: Attention) -> None:
    a = attention_inputs(case)
    got, expected = run(a), dense(a)
    for name in expected:
        assert_within(name, got[name], expected[name], 1e-13 * (1 + np.abs(expected[name]).max()))


# A position left out of the bias's gradient, a head's sums in another's place, or what was there overwritten.
@pytest.mark.parametrize("case", ATTENTION)
def test_bias_gradient_is_the_sum_over_positions(case: Attention) -> None:
    a = attention_inputs(case)
    dbias = np.full((case.heads + 2 * case.kv_heads) * case.head_dim, 3.0)
    got = run(a, dbias)
    assert_same_bits(got, run(a))
    rows = got["dqkv"].reshape(-1, dbias.size)
    assert_within("dbias", dbias, 3 + rows.sum(axis=0), 1e-14 * (3 + np.abs(rows).sum(axis=0).max()))


# A missing delta, or a query of a group left out of dk and dv.
@pytest.mark.parametrize("case", ATTENTION)
def test_gradient(case: Attention) -> None:
    assert_gradients(run, attention_inputs(case), {"out": "dout"}, ("qkv",))


# A sum or the exponential held in the wrong precision. Where a token sees only itself, all of ds cancels.
@pytest.mark.parametrize("case", ATTENTION)
def test_float32(case: Attention) -> None:
    a = attention_inputs(case)
    assert_float32(run, a, case.length + case.head_dim, {"lse": 1 + float(np.abs(run(a)["lse"]).max())})


# As exact as the plain dense computation in the same precision; the sums run in another order.
@pytest.mark.parametrize("case", ATTENTION[5:])
def test_error_is_that_of_the_dense_computation(case: Attention) -> None:
    a = attention_inputs(case)
    assert_calibrated(run(single(a)), dense(a), dense(single(a)), 3)


# Two threads that add to the gradient of one key.
def test_same_bits_again_and_on_one_thread() -> None:
    assert_repeats(run, attention_inputs(Attention(3, 33, 6, 3, 16, 0.1)))


# One key too many, anywhere in the tiles of four: the model would learn to copy the answer.
@pytest.mark.parametrize("seen", [1, 4, 7, 16])
def test_the_future_has_no_influence(seen: int) -> None:
    a = single(attention_inputs(ATTENTION[6]))
    other = single(a)
    other["qkv"][:, seen:] = 1e6  # finite: a tile multiplies what it may not see by an exact zero
    got, changed = run(a), run(other)
    assert_same_bits({"out": changed["out"][:, :seen].copy()}, {"out": got["out"][:, :seen].copy()})
    assert_same_bits({"lse": changed["lse"][:, :, :seen].copy()}, {"lse": got["lse"][:, :, :seen].copy()})


# One key too many at the other end: a packed conversation would read the one before it. Backward, too, stays
# within.
@pytest.mark.parametrize("border", [1, 4, 6, 16])
def test_another_document_has_no_influence(border: int) -> None:
    a = single(attention_inputs(ATTENTION[6]))
    a["start"][:] = np.where(np.arange(17) < border, 0, border)
    other = single(a)
    other["qkv"][:, :border] *= -50
    other["dout"][:, :border] *= -50
    got, changed = run(a), run(other)
    for name in ("out", "dqkv"):
        assert_same_bits({name: changed[name][:, border:].copy()}, {name: got[name][:, border:].copy()})
    other = single(a)
    other["qkv"][:, border:] *= -50
    other["dout"][:, border:] *= -50
    changed = run(other)
    assert_same_bits({"dqkv": changed["dqkv"][:, :border].copy()}, {"dqkv": got["dqkv"][:, :border].copy()})


# delta by dout . out alone: its rounding, not the gradient, is what is left of a query that gives one key
# nearly all its weight.
def test_gradient_of_a_decided_query() -> None:
    a = attention_inputs(ATTENTION[6])
    a["qkv"][:, :, :5] *= 4
    a = single(a)
    head_dim, wide = (
        a["dout"].shape[-1],
        {name: array.astype(np.float64) for name, array in a.items() if name != "start"},
    )
    q, k, v, seen = split({**wide, "start": a["start"]})
    size = (np.abs(q) @ np.abs(k).swapaxes(2, 3)).max() / head_dim**0.5
    score = np.where(seen, q @ k.swapaxes(2, 3) / head_dim**0.5, -np.inf)
    p = np.exp(score - score.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    # ds[j] = p[j] * sum_i p[i] (dp[j] - dp[i]): of the differences, what other keys weigh; p's own error is
    # that of its score.
    largest = (np.abs(wide["dout"]).transpose(0, 2, 1, 3) @ np.abs(v).swapaxes(2, 3)).max()
    units = 2.0**-24 * (2 * head_dim + 4 + 4 * ((head_dim + 2) * size + 8))
    dscore = units * largest * p * (1 - p + 2.0**-24 * head_dim) / head_dim**0.5
    assert (p.max(axis=-1) > 1 - 1e-4).mean() > 0.4
    error = np.abs(run(a)["dqkv"] - dense({**wide, "start": a["start"]})["dqkv"]).transpose(0, 2, 1, 3)
    assert (error[:, :4] <= dscore @ np.abs(k)).all()
    assert (error[:, 4] <= (dscore.swapaxes(2, 3) @ np.abs(q)).sum(axis=1)).all()


# exp of an unshifted score overflows at 89 in float32; a mean of values lies among the values.
def test_large_scores() -> None:
    a = attention_inputs(ATTENTION[6])
    a["qkv"][:, :, :5] *= 300
    got, exact, expected = run(single(a)), run(a), dense(a)
    assert_within("out", exact["out"], expected["out"], 1e-9)
    assert np.abs(expected["lse"]).max() > 1e5
    assert_within("lse", got["lse"], expected["lse"], UNITS * np.abs(expected["lse"]).max())
    assert np.isfinite(got["dqkv"]).all()
    assert np.abs(got["out"]).max() <= np.abs(a["qkv"][:, :, 5:]).max() * (1 + 1e-5)


# Units of a score's product over 16 features, and of lse.
UNITS = 2.0**-24 * (16 + 16)
