"""QK-norm, with RoPE and without."""

from typing import Any

import numpy as np
import pytest

from kernels.cpu.qk_norm import qk_norm_backward, qk_norm_forward
from kernels.cpu.rmsnorm import rmsnorm_forward
from kernels.cpu.rope import rope_forward, rope_table
from tests.cases import ROPE
from tests.compare import (
    Arrays,
    assert_float32,
    assert_gradients,
    assert_repeats,
    assert_within,
    documents,
    normal,
    unwritten,
)
from tests.cuda import STORAGES, Side, assert_calibrated_op

BATCH, LENGTH, EPS = 3, 13, 1e-3  # EPS as large as a mean square may be, so that a wrong place shows
KINDS = ("weighted", "unweighted", "without rotation")


def inputs(kind: str, heads: int, kv_heads: int, head_dim: int, length: int = LENGTH) -> Arrays:
    """Random arrays. An input near 0 would make the norm's curvature too large for central differences."""
    rng = np.random.default_rng([heads, head_dim])
    shape = (BATCH, length, heads + 2 * kv_heads, head_dim)
    a = {
        "qkv": normal(rng, *shape) + np.where(rng.random(shape) < 0.5, 1.0, -1.0),
        "dout": normal(rng, *shape),
        "start": documents(rng, BATCH, length, 0.2),
        "kv_heads": np.array(kv_heads),
    }
    if kind != "without rotation":
        a["table"] = rope_table(length + 3, head_dim, 10000.0)
    if kind != "unweighted":
        a |= {name: 1 + 0.3 * normal(rng, head_dim) for name in ("query_weight", "key_weight")}
    return a


def run(a: Arrays) -> Arrays:
    """Forward and backward pass, both in place."""
    out, dqkv, kv_heads = a["qkv"].copy(), a["dout"].copy(), int(a["kv_heads"])
    batch, length, heads, _ = out.shape
    rstd = unwritten(np.zeros((batch * length, heads - kv_heads), out.dtype))
    given: Any = (a["start"], *(a.get(name) for name in ("table", "query_weight", "key_weight")))
    qk_norm_forward(out, rstd, *given, kv_heads=kv_heads, eps=EPS)
    dweights = {name: np.zeros_like(a[name]) for name in ("query_weight", "key_weight") if name in a}
    dq, dk = dweights.get("query_weight"), dweights.get("key_weight")
    qk_norm_backward(dqkv, dq, dk, out, rstd, *given, kv_heads=kv_heads)
    return {"out": out, "dqkv": dqkv} | {f"d{name}": dweight for name, dweight in dweights.items()}


# A norm over the wrong elements, queries' weight on keys, eps outside of the root, or the rotation first.
@pytest.mark.parametrize("kind", KINDS)
def test_is_rmsnorm_then_rope(kind: str) -> None:
    a = inputs(kind, 4, 2, 16)
    expected = a["qkv"].copy()
    for heads, name in ((slice(0, 4), "query_weight"), (slice(4, 6), "key_weight")):
        part = np.ascontiguousarray(expected[:, :, heads])
        rows, out = part.reshape(-1, 16), np.empty((part.size // 16, 16))
        rmsnorm_forward(out, np.empty(len(rows)), rows, a.get(name, np.ones(16)), eps=EPS)
        expected[:, :, heads] = out.reshape(part.shape)
    if "table" in a:
        rope_forward(expected, a["start"], a["table"], rotated=6)
    assert_within("out", run(a)["out"], expected, 1e-15 * 16)


# A gradient of the norm, or of a weight, in the rotated frame; a sum over the wrong heads.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ROPE)
def test_gradient(case: tuple[int, int, int], kind: str) -> None:
    a = inputs(kind, *case)
    weights = [name for name in ("query_weight", "key_weight") if name in a]
    assert_gradients(run, a, {"out": "dout"}, ("qkv", *weights))


# Sums over heads and rows in an order that loses digits.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ROPE)
def test_float32(case: tuple[int, int, int], kind: str) -> None:
    heads, kv_heads, head_dim = case
    dweights = [f"d{name}" for name in ("query_weight", "key_weight") if kind != "unweighted"]
    assert_float32(run, inputs(kind, *case), head_dim, names=("out", "dqkv"))
    if dweights:
        assert_float32(run, inputs(kind, *case), BATCH * LENGTH * max(heads, kv_heads), names=dweights)


# A head that two threads change, or a sum whose order depends on their number.
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_again_and_on_one_thread(kind: str) -> None:
    assert_repeats(run, inputs(kind, 4, 2, 16))


# Values that are normalised or rotated.
def test_values_stay() -> None:
    a = inputs("weighted", 4, 2, 16)
    got = run(a)
    np.testing.assert_array_equal(got["out"][:, :, 6:], a["qkv"][:, :, 6:])
    np.testing.assert_array_equal(got["dqkv"][:, :, 6:], a["dout"][:, :, 6:])


# A division by a weight of 0, whose NaN would spread through the whole model.
def test_a_weight_of_zero_gets_no_gradient() -> None:
    a = inputs("weighted", 4, 2, 16)
    a["query_weight"][3] = 0
    got = run(a)
    assert all(np.isfinite(array).all() for array in got.values())
    assert got["dquery_weight"][3] == 0


# A lane past the head's end, a sum that misses a team, or a key's gradient in the queries' sum on the GPU.
@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 37, 700])
@pytest.mark.parametrize("case", (*ROPE, (12, 4, 64), (5, 5, 128), (1, 1, 256), (2, 1, 250)))
def test_on_the_gpu(case: tuple[int, int, int], length: int, kind: str, storage: np.dtype) -> None:
    def on(side: Side, a: Arrays) -> Arrays:
        qkv, dqkv, kv_heads = side.stored(a["qkv"]), side.stored(a["dout"]), int(a["kv_heads"])
        batch, length, heads, _ = a["qkv"].shape
        rstd = side.single(np.zeros((batch * length, heads - kv_heads)))
        table, q_weight, k_weight = (
            side.single(a[name]) if name in a else None for name in ("table", "query_weight", "key_weight")
        )
        given = side.same(a["start"]), table, q_weight, k_weight
        side(qk_norm_forward, qkv, rstd, *given, kv_heads=kv_heads, eps=EPS)
        dq, dk = (None if q_weight is None else side.single(np.zeros(a["qkv"].shape[3])) for _ in range(2))
        side(qk_norm_backward, dqkv, dq, dk, qkv, rstd, *given, kv_heads=kv_heads)
        found = {"qkv": qkv, "dqkv": dqkv, "rstd": rstd}
        return found if dq is None or dk is None else found | {"dquery_weight": dq, "dkey_weight": dk}

    assert_calibrated_op(
        on, inputs(kind, *case, length), storage, sums=("dquery_weight", "dkey_weight"), single=("rstd",)
    )
