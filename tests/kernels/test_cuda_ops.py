"""CUDA operations without a test file of their own, against the CPU's: norms, biases, activations, rope and
embedding.

Each would catch an index beyond a row's or a block's end, a sum that leaves out a part, a rounding too many,
and a race.
"""

import numpy as np
import pytest

from kernels.cpu.bias import bias_backward, bias_forward
from kernels.cpu.embedding import embedding_backward, embedding_forward
from kernels.cpu.gelu import gelu_backward, gelu_forward
from kernels.cpu.layernorm import (
    layernorm_backward,
    layernorm_forward,
    residual_layernorm_backward,
    residual_layernorm_forward,
)
from kernels.cpu.rmsnorm import (
    residual_rmsnorm_backward,
    residual_rmsnorm_forward,
    rmsnorm_backward,
    rmsnorm_forward,
)
from kernels.cpu.rope import rope_backward, rope_forward, rope_table
from kernels.cpu.swiglu import swiglu_backward, swiglu_forward
from tests.cases import EMBEDDING, ROPE, ROWS, Embedding
from tests.compare import Array, Arrays, documents, normal, unwritten
from tests.cuda import STORAGES, Run, Side, assert_calibrated_op

EPS = 1e-5
# Beside the CPU's: a warp's or a thread's vectors more or less 1, rows that a block owns, and more rows than
# blocks at a time.
WIDE = ((1, 1), (7, 255), (8, 256), (9, 264), (31, 1031), (33, 776), (5, 1600), (3, 4096), (4409, 768))
LISTS = (
    Embedding(1, 1023, 8, 255, 0.01),
    Embedding(1, 1025, 264, 257, 0.0),
    Embedding(4, 1031, 768, 5003, 0.002),
    Embedding(3, 700, 40, 1, 0.9),
)

pytestmark = pytest.mark.gpu
storages = pytest.mark.parametrize("storage", STORAGES, ids=("fp32", "bf16"))


def row_inputs(rows: int, width: int) -> Arrays:
    """Random arrays of the operations over rows; what is accumulated begins with dweight, dbias and
    dbranch_bias.
    """
    rng = np.random.default_rng([rows, width])
    arrays = {name: normal(rng, rows, width) for name in ("inp", "dout", "residual", "dresidual")}
    vectors = ("weight", "bias", "dweight", "dbias", "branch_bias", "dbranch_bias")
    return {**arrays, **{name: normal(rng, width) for name in vectors}}


def stored(side: Side, a: Arrays, *names: str) -> list[Array]:
    """Arrays of the storage type by their names."""
    return [side.stored(a[name]) for name in names]


def single(side: Side, a: Arrays, *names: str) -> list[Array]:
    """Arrays of fp32 by their names: a stream, and the parameters that make it and read it."""
    return [side.single(a[name]) for name in names]


def rmsnorm(side: Side, a: Arrays) -> Arrays:
    (inp, weight), (dout,) = single(side, a, "inp", "weight"), stored(side, a, "dout")
    out, dinp = (side.stored(unwritten(a["inp"])) for _ in range(2))
    rstd, dweight = side.single(unwritten(a["inp"], len(a["inp"]))), side.single(a["dweight"])
    side(rmsnorm_forward, out, rstd, inp, weight, eps=EPS)
    side(rmsnorm_backward, dinp, dweight, dout, inp, weight, rstd)
    side(rmsnorm_backward, dout, side.single(a["dweight"]), dout, inp, weight, rstd)
    return {"out": out, "rstd": rstd, "dinp": dinp, "aliased": dout, "dweight": dweight}


def residual_rmsnorm(side: Side, a: Arrays) -> Arrays:
    """Also without a bias of the branch, and where nothing arrives along the stream."""
    residual, branch_bias, weight = single(side, a, "residual", "branch_bias", "weight")
    inp, dout, dresidual = stored(side, a, "inp", "dout", "dresidual")
    out, bare, dinp, last = (side.stored(unwritten(a["inp"])) for _ in range(4))
    total, bare_total = (side.single(unwritten(a["inp"])) for _ in range(2))
    rstd, bare_rstd = (side.single(unwritten(a["inp"], len(a["inp"]))) for _ in range(2))
    sums, last_sums = ([side.single(a[name]) for name in ("dweight", "dbranch_bias")] for _ in range(2))
    side(residual_rmsnorm_forward, bare_total, bare, bare_rstd, residual, inp, None, weight, eps=EPS)
    side(residual_rmsnorm_forward, total, out, rstd, residual, inp, branch_bias, weight, eps=EPS)
    side(residual_rmsnorm_backward, dinp, *sums, dresidual, dout, total, weight, rstd)
    side(residual_rmsnorm_backward, last, *last_sums, None, dout, total, weight, rstd)
    side(
        residual_rmsnorm_backward,
        dresidual,
        side.single(a["dweight"]),
        None,
        dresidual,
        dout,
        total,
        weight,
        rstd,
    )
    return {
        "bare_total": bare_total, "bare": bare, "total": total, "out": out, "rstd": rstd, "dinp": dinp,
        "aliased": dresidual, "dweight": sums[0], "dbranch_bias": sums[1], "last": last,
        "last_dbranch_bias": last_sums[1],
    }  # fmt: skip


def layernorm(side: Side, a: Arrays) -> Arrays:
    (inp, weight, bias), (dout,) = single(side, a, "inp", "weight", "bias"), stored(side, a, "dout")
    out, dinp = (side.stored(unwritten(a["inp"])) for _ in range(2))
    mean, rstd = (side.single(unwritten(a["inp"], len(a["inp"]))) for _ in range(2))
    sums, again = ([side.single(a[name]) for name in ("dweight", "dbias")] for _ in range(2))
    side(layernorm_forward, out, mean, rstd, inp, weight, bias, eps=EPS)
    side(layernorm_backward, dinp, *sums, dout, inp, weight, mean, rstd)
    side(layernorm_backward, dout, *again, dout, inp, weight, mean, rstd)
    return {
        "out": out, "mean": mean, "rstd": rstd, "dinp": dinp, "aliased": dout, "dweight": sums[0], "dbias": sums[1]
    }  # fmt: skip


def residual_layernorm(side: Side, a: Arrays) -> Arrays:
    """Also without a bias of the branch, and where nothing arrives along the stream."""
    residual, branch_bias, weight, bias = single(side, a, "residual", "branch_bias", "weight", "bias")
    inp, dout, dresidual = stored(side, a, "inp", "dout", "dresidual")
    out, bare, dinp, last = (side.stored(unwritten(a["inp"])) for _ in range(4))
    total, bare_total = (side.single(unwritten(a["inp"])) for _ in range(2))
    saved, bare_saved = (
        [side.single(unwritten(a["inp"], len(a["inp"]))) for _ in range(2)] for _ in range(2)
    )
    sums, last_sums = (
        [side.single(a[name]) for name in ("dweight", "dbias", "dbranch_bias")] for _ in range(2)
    )
    again = [side.single(a[name]) for name in ("dweight", "dbias")]
    side(
        residual_layernorm_forward, bare_total, bare, *bare_saved, residual, inp, None, weight, bias, eps=EPS
    )
    side(residual_layernorm_forward, total, out, *saved, residual, inp, branch_bias, weight, bias, eps=EPS)
    side(residual_layernorm_backward, dinp, *sums, dresidual, dout, total, weight, *saved)
    side(residual_layernorm_backward, last, *last_sums, None, dout, total, weight, *saved)
    side(residual_layernorm_backward, dresidual, *again, None, dresidual, dout, total, weight, *saved)
    return {
        "bare_total": bare_total, "bare": bare, "total": total, "out": out, "mean": saved[0],
        "rstd": saved[1], "dinp": dinp, "aliased": dresidual, "dweight": sums[0], "dbias": sums[1],
        "dbranch_bias": sums[2], "last": last, "last_dbranch_bias": last_sums[2],
    }  # fmt: skip


def bias(side: Side, a: Arrays) -> Arrays:
    inp, aliased, weight, dout = stored(side, a, "inp", "inp", "bias", "dout")
    out, dbias = side.stored(unwritten(a["inp"])), side.single(a["dbias"])
    side(bias_forward, out, inp, weight)
    side(bias_forward, aliased, aliased, weight)
    side(bias_backward, dbias, dout)
    return {"out": out, "aliased": aliased, "dbias": dbias}


def gelu(side: Side, a: Arrays) -> Arrays:
    inp, dout = stored(side, {**a, "inp": 3 * a["inp"]}, "inp", "dout")
    out, dinp = (side.stored(unwritten(a["inp"])) for _ in range(2))
    side(gelu_forward, out, inp)
    side(gelu_backward, dinp, dout, inp)
    side(gelu_backward, dout, dout, inp)
    return {"out": out, "dinp": dinp, "aliased": dout}


def swiglu(side: Side, a: Arrays) -> Arrays:
    both = np.concatenate((3 * a["inp"], a["residual"]), axis=1)
    inp, dout, out, dinp = (side.stored(x) for x in (both, a["dout"], unwritten(a["inp"]), unwritten(both)))
    side(swiglu_forward, out, inp)
    side(swiglu_backward, dinp, dout, inp)
    return {"out": out, "dinp": dinp}


# Beside the above: a branch's bias left out of the sum, or added where there is none; its gradient summed
# from rounded values.
@storages
@pytest.mark.parametrize("shape", (*ROWS, *WIDE))
@pytest.mark.parametrize("run", [rmsnorm, residual_rmsnorm, layernorm, residual_layernorm])
def test_norm(run: Run, shape: tuple[int, int], storage: np.dtype[np.generic]) -> None:
    a = row_inputs(*shape)
    total = a["inp"] + (a["residual"] + a["branch_bias"] if "residual" in run.__name__ else 0)
    square = total.var(axis=1) if "layer" in run.__name__ else (total**2).mean(axis=1)
    # The terms of dinp are of the size of rstd * g and may cancel, as those of the mean and of a sum of dinp.
    size = float(np.abs(a["dout"]).max() * np.abs(a["weight"]).max() / np.sqrt(square + EPS).min())
    scale = {name: size for name in ("dinp", "aliased", "last", "dbranch_bias", "last_dbranch_bias")}
    scale["mean"] = float(np.abs(total).max())
    sums = ("dweight", "dbias", "dbranch_bias", "last_dbranch_bias")
    assert_calibrated_op(
        run, a, storage, sums=sums, single=("mean", "rstd", "total", "bare_total"), scale=scale
    )


@storages
@pytest.mark.parametrize("shape", (*ROWS, *WIDE, (70, 3072)))
@pytest.mark.parametrize("run", [bias, gelu, swiglu])
def test_elementwise(run: Run, shape: tuple[int, int], storage: np.dtype[np.generic]) -> None:
    assert_calibrated_op(run, row_inputs(*shape), storage, sums=("dbias",))


def rope(side: Side, a: Arrays) -> Arrays:
    qkv, dqkv = stored(side, a, "qkv", "dqkv")
    start, table, rotated = side.same(a["start"]), side.single(a["table"]), int(a["rotated"])
    side(rope_forward, qkv, start, table, rotated=rotated)
    side(rope_backward, dqkv, start, table, rotated=rotated)
    return {"qkv": qkv, "dqkv": dqkv}


@storages
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("heads, kv_heads, head_dim", (*ROPE, (12, 4, 64), (5, 5, 128)))
def test_rope(heads: int, kv_heads: int, head_dim: int, decode: bool, storage: np.dtype[np.generic]) -> None:
    rng = np.random.default_rng([heads, head_dim])
    batch, length, context = 3, 1 if decode else 37, 40
    shape = batch, length, heads + 2 * kv_heads, head_dim
    start = (
        -rng.integers(context, size=(batch, 1), dtype=np.int32)
        if decode
        else documents(rng, batch, length, 0.1)
    )
    a = {
        "qkv": normal(rng, *shape),
        "dqkv": normal(rng, *shape),
        "start": start,
        "rotated": np.array(heads + kv_heads),
    }
    a["table"] = rope_table(context, head_dim, 10000.0)
    assert_calibrated_op(rope, a, storage)


def embedding(side: Side, a: Arrays) -> Arrays:
    (weight, position_weight), (dout,) = single(side, a, "weight", "position_weight"), stored(side, a, "dout")
    tokens, start = side.same(a["tokens"]), side.same(a["start"])
    out, without = (side.single(unwritten(a["dout"])) for _ in range(2))
    dweight, alone, dposition = (side.single(a[name]) for name in ("dweight", "dweight", "dposition_weight"))
    side(embedding_forward, without, tokens, start, weight, None)
    side(embedding_forward, out, tokens, start, weight, position_weight)
    side(embedding_backward, alone, None, dout, tokens, start)
    side(embedding_backward, dweight, dposition, dout, tokens, start)
    return {"without": without, "out": out, "alone": alone, "dweight": dweight, "dposition_weight": dposition}


@storages
@pytest.mark.parametrize("case", (*EMBEDDING, *LISTS))
def test_embedding(case: Embedding, storage: np.dtype[np.generic]) -> None:
    rng = np.random.default_rng([case.length, case.dim])
    a = {name: normal(rng, case.vocab_size, case.dim) for name in ("weight", "dweight")}
    a |= {name: normal(rng, case.length + 2, case.dim) for name in ("position_weight", "dposition_weight")}
    a["dout"] = normal(rng, case.batch * case.length, case.dim)
    # One token in four is the last of the vocabulary: its list is long.
    tokens = rng.integers(case.vocab_size, size=(case.batch, case.length))
    a["tokens"] = np.where(rng.random(tokens.shape) < 0.25, case.vocab_size - 1, tokens).astype(np.int32)
    a["start"] = documents(rng, case.batch, case.length, case.documents)
    sums = ("dweight", "alone", "dposition_weight")
    assert_calibrated_op(embedding, a, storage, sums=sums, single=("out", "without"), exact=("without",))
