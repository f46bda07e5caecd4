"""Rotary position embedding."""

import numpy as np
import pytest

from kernels.cpu.rope import rope_backward, rope_forward, rope_table
from tests.cases import ROPE
from tests.compare import (
    Arrays,
    assert_float32,
    assert_gradients,
    assert_repeats,
    assert_same_bits,
    assert_within,
    documents,
    normal,
    single,
)

BATCH, LENGTH, BASE = 2, 13, 10000.0


def inputs(heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Random arrays; the table is longer than the rows."""
    rng = np.random.default_rng([heads, head_dim])
    shape = (BATCH, LENGTH, heads + 2 * kv_heads, head_dim)
    return {
        "qkv": normal(rng, *shape),
        "dout": normal(rng, *shape),
        "start": documents(rng, BATCH, LENGTH, 0.2),
        "table": rope_table(LENGTH + 3, head_dim, BASE),
        "rotated": np.array(heads + kv_heads),
    }


def run(a: Arrays) -> Arrays:
    """Both rotations are in place."""
    out, dqkv = a["qkv"].copy(), a["dout"].copy()
    rope_forward(out, a["start"], a["table"], rotated=int(a["rotated"]))
    rope_backward(dqkv, a["start"], a["table"], rotated=int(a["rotated"]))
    return {"out": out, "dqkv": dqkv}


# Pairs in another order (neighbours instead of halves), or frequencies that run the other way.
def test_table_and_rotation_by_hand() -> None:
    table = rope_table(3, 4, 100.0)
    angle = np.array([[0, 0], [1, 0.1], [2, 0.2]])
    assert_within("table", table, np.stack((np.cos(angle), np.sin(angle)), axis=1), 1e-15)
    qkv = np.zeros((1, 3, 3, 4))
    qkv[..., 0], qkv[..., 3] = 1, 1
    rope_forward(qkv, np.zeros((1, 3), np.int32), table, rotated=2)
    expected = [np.cos(2), -np.sin(0.2), np.sin(2), np.cos(0.2)]
    assert_within("q", qkv[0, 2, 0], np.array(expected), 1e-15)


# A sign of the backward rotation.
@pytest.mark.parametrize("case", ROPE)
def test_gradient(case: tuple[int, int, int]) -> None:
    assert_gradients(run, inputs(*case), {"out": "dout"}, ("qkv",))


# Angles computed in float32 lose a long position; the table is made in float64 and rounded once.
@pytest.mark.parametrize("case", ROPE)
def test_float32(case: tuple[int, int, int]) -> None:
    assert_float32(run, inputs(*case), 2)


# A pair that two threads turn.
def test_same_bits_again_and_on_one_thread() -> None:
    assert_repeats(run, inputs(4, 2, 16))


# The gradient of a rotation is its inverse: forward, then backward, is where it began.
def test_backward_turns_back() -> None:
    a = inputs(4, 2, 16)
    back = run({**a, "dout": run(a)["out"]})["dqkv"]
    assert_within("qkv", back, a["qkv"], 1e-15 * 8)


# Values must not turn, in either direction.
def test_values_stay() -> None:
    a = inputs(4, 2, 16)
    got = run(a)
    np.testing.assert_array_equal(got["out"][:, :, 6:], a["qkv"][:, :, 6:])
    np.testing.assert_array_equal(got["dqkv"][:, :, 6:], a["dout"][:, :, 6:])


# What RoPE is for: the product of a query and a key depends on the distance alone.
def test_products_depend_on_the_distance() -> None:
    a = inputs(1, 1, 10)
    a["qkv"][:] = a["qkv"][:1, :1]
    a["start"][:] = 0
    out = run(a)["out"][0]
    score = out[:, 0] @ out[:, 1].T
    for distance in range(LENGTH):
        diagonal = np.diagonal(score, -distance)
        assert_within("score", diagonal, np.full_like(diagonal, diagonal[0]), 1e-13)
    assert np.abs(score[1:, 0] - score[0, 0]).max() > 0.1


# A packed document would see other positions than the same one alone.
def test_positions_start_again_with_a_document() -> None:
    a = single(inputs(4, 2, 16))
    a["start"][:] = 0
    packed = single(a)
    packed["qkv"][:, 5:] = a["qkv"][:, :8]
    packed["dout"][:, 5:] = a["dout"][:, :8]
    packed["start"][:, 5:] = 5
    alone, got = run(a), run(packed)
    assert_same_bits(
        {name: got[name][:, 5:].copy() for name in got}, {name: alone[name][:, :8].copy() for name in alone}
    )
