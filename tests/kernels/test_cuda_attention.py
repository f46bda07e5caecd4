"""Attention on the GPU, by Hopper's and by every GPU's tensor cores and in plain fp32 arithmetic, against the
CPU's.
"""

from functools import partial

import numpy as np
import pytest

from kernels.cpu.attention import attention_backward, attention_forward
from kernels.cpu.bias import bias_backward
from kernels.cpu.decode_attention import decode_attention_forward
from tests.cases import ATTENTION, Attention
from tests.compare import Arrays, assert_same_bits, attention_inputs, normal, unwritten
from tests.cuda import STORAGES, Cpu, Gpu, Side, assert_calibrated_op, gpu, truncated

pytestmark = pytest.mark.gpu

# Every head width that has a tensor-core kernel, tiles that end inside a row or a document, many tiles a row,
# and more tiles than multiprocessors.
TILED = (
    Attention(2, 130, 4, 2, 32, 0.02),
    Attention(1, 257, 2, 2, 64, 0.0),
    Attention(2, 64, 6, 2, 64, 0.3),
    Attention(1, 200, 3, 1, 96, 0.05),
    Attention(1, 191, 2, 1, 128, 0.01),
    Attention(1, 1024, 4, 4, 64, 0.0),
    Attention(2, 1030, 4, 1, 64, 0.003),
    Attention(3, 1, 2, 2, 64, 0.0),
    Attention(2, 513, 4, 2, 128, 0.01),
    Attention(9, 300, 8, 8, 64, 0.01),
    Attention(9, 300, 16, 8, 128, 0.01),
)
FLOAT, BF16 = STORAGES
KERNELS = {
    "fp32": (FLOAT, "fp32", "mma", True),
    "tf32-mma": (FLOAT, "tf32", "mma", True),
    "bf16-scalar": (BF16, "bf16", "scalar", True),
    "bf16-mma": (BF16, "bf16", "mma", True),
    "bf16-hopper": (BF16, "bf16", "hopper", True),
    "bf16-hopper-unordered": (BF16, "bf16", "hopper", False),
}


@pytest.fixture(params=KERNELS.values(), ids=list(KERNELS))
def kernel(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[np.dtype[np.generic], str]:
    """The storage and the precision, of a GPU set to them and to one of the kernels; fp32 gets the scalar one
    all the same.
    """
    storage, precision, attention, deterministic = request.param
    monkeypatch.setattr(gpu(), "deterministic", deterministic, raising=False)
    monkeypatch.setattr(gpu(), "precision", precision, raising=False)
    monkeypatch.setattr(gpu(), "attention", attention, raising=False)
    return storage, precision


def attention(side: Side, a: Arrays, tf32: bool = False, bias: bool = True) -> Arrays:
    """Forward and backward; where tensor cores multiply tf32, the baseline's factors are rounded to that.

    Also the bias's gradient, on top of ones: the CPU's after its dqkv is rounded, as the GPU may sum what it
    has stored.
    """
    batch, length, heads, _ = a["dout"].shape
    if tf32 and isinstance(side, Cpu) and side.precision is np.float32:
        a = {**a, "qkv": truncated(a["qkv"]), "dout": truncated(a["dout"])}
    qkv, dout, start = side.stored(a["qkv"]), side.stored(a["dout"]), side.same(a["start"])
    out, dqkv = side.stored(unwritten(a["dout"])), side.stored(unwritten(a["qkv"]))
    lse = side.single(unwritten(a["dout"], batch, heads, length))
    side(attention_forward, out, lse, qkv, start)
    dbias = side.single(np.ones(a["qkv"][0, 0].size))
    side(
        attention_backward,
        dqkv,
        dout,
        out,
        lse,
        qkv,
        start,
        dbias if bias and isinstance(side, Gpu) else None,
    )
    if isinstance(side, Cpu):
        side(bias_backward, dbias, dqkv.reshape(batch * length, -1))
    return {"out": out, "lse": lse, "dqkv": dqkv, "dbias": dbias}


# A tile or a head too many or too few, a key of another document, a fragment in the wrong lane, a tile's sums
# never written.
@pytest.mark.parametrize("case", [*ATTENTION, *TILED])
def test_attention(case: Attention, kernel: tuple[np.dtype[np.generic], str]) -> None:
    storage, precision = kernel
    run = partial(attention, tf32=precision == "tf32" and case.head_dim % 32 == 0)
    arrays, repeats = attention_inputs(case), gpu().deterministic
    # A query's ds cancel, as do dk's sums and a dq that sees one key: what is left of each row is the
    # rounding of such a term.
    term = np.abs(arrays["dout"]).max() * np.abs(arrays["qkv"]).max() ** 2
    scale = {"dbias": float(np.sqrt(case.batch * case.length) * term)}
    assert_calibrated_op(run, arrays, storage, sums=("dbias",), single=("lse",), scale=scale, repeats=repeats)


# What a model with RoPE calls: sums written all the same, through a null pointer, or another gradient.
@pytest.mark.parametrize("case", TILED)
def test_gradient_without_the_bias(case: Attention, kernel: tuple[np.dtype[np.generic], str]) -> None:
    side, arrays = Gpu(kernel[0]), attention_inputs(case)
    got, alone = ({"dqkv": side.host(attention(side, arrays, bias=bias)["dqkv"])} for bias in (True, False))
    assert np.isfinite(alone["dqkv"]).all()
    if gpu().deterministic:
        assert_same_bits(alone, got)


def decode(side: Side, a: Arrays) -> Arrays:
    """The last third of a sequence over a cache of the rest."""
    qkv, length, heads = a["qkv"], int(a["length"]), int(a["heads"])
    batch, context, _, head_dim = qkv.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    cached = np.full((2, batch, context, kv_heads, head_dim), np.nan)
    cached[0, :, :length], cached[1, :, :length] = (
        qkv[:, :length, heads:-kv_heads],
        qkv[:, :length, -kv_heads:],
    )
    keys, values, new = (
        side.stored(cached[0]),
        side.stored(cached[1]),
        side.stored(np.ascontiguousarray(qkv[:, length:])),
    )
    out = side.stored(unwritten(qkv, batch, context - length, heads, head_dim))
    side(decode_attention_forward, out, new, keys, values, side.same(np.array(length, np.int32)))
    return {"out": out, "keys": keys, "values": values}


# A cached row that is not read or read twice, new keys in the wrong row, a part of the keys that no block
# takes.
@pytest.mark.parametrize("storage", STORAGES, ids=("fp32", "bf16"))
@pytest.mark.parametrize("new", [1, 3, 70])
@pytest.mark.parametrize("case", [*ATTENTION, *TILED])
def test_decode(case: Attention, new: int, storage: np.dtype[np.generic]) -> None:
    if new >= case.length:
        pytest.skip("nothing is cached")
    rng = np.random.default_rng(case[:5])
    qkv = normal(rng, case.batch, case.length, case.heads + 2 * case.kv_heads, case.head_dim)
    arrays = {"qkv": qkv, "length": np.array(case.length - new), "heads": np.array(case.heads)}
    assert_calibrated_op(decode, arrays, storage, exact=("keys", "values"))


# Weights of tokens that are far apart, where a running maximum that is not carried along overflows or loses
# what came before.
def test_large_scores(kernel: tuple[np.dtype[np.generic], str]) -> None:
    storage, _ = kernel
    rng = np.random.default_rng(0)
    arrays = {
        "qkv": normal(rng, 1, 300, 4, 64) * 12,
        "dout": normal(rng, 1, 300, 2, 64),
        "start": np.zeros((1, 300), np.int32),
    }
    side = Gpu(storage)
    got = {name: side.host(array) for name, array in attention(side, arrays).items()}
    assert all(np.isfinite(array).all() for array in got.values())
