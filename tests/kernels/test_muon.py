"""Muon: the iteration, an update, which matrices get it, and an engine that trains with it."""

from typing import Any

import numpy as np
import pytest

from kernels.config import Numerics
from kernels.cpu import CpuOps
from kernels.cpu.muon import ITERATIONS, MOMENTUM, SCALE, iterate, muon
from kernels.engine import Engine
from kernels.memory import memory_plan
from kernels.optimizers import OPTIMIZERS, Matrices, block_matrices
from kernels.parameters import (
    DECAYS,
    GROUP_SHIFT,
    GROUPS,
    MUON,
    SEGMENT,
    ZERO_GRAD,
    flat_size,
    named,
    parameter_table,
)
from tests.compare import (
    Array,
    Arrays,
    assert_repeats,
    assert_same_bits,
    assert_within,
    normal,
    single,
    unwritten,
)
from tests.gradient_check import MODELS, make_problem

# Wide, square and tall; columns that no vector divides; a product of few rows, which goes another way; a
# single row and column.
SHAPES = ((64, 128), (48, 48), (130, 43), (17, 130), (5, 40), (1, 9), (9, 1))
CPU = CpuOps()
CONSTANTS: dict[str, Any] = {"weight_decay": 0.1, "grad_clip": 1.0}
NAMES = pytest.mark.parametrize("name", MODELS)


def matrix(m: int, n: int, least: float = 0.02) -> tuple[Array, Array]:
    """A random matrix whose singular values are `least` to 1, and the orthogonal one of the same singular
    vectors.
    """
    k = min(m, n)
    u, _, vt = np.linalg.svd(normal(np.random.default_rng([m, n]), m, n), full_matrices=False)
    return (u * np.geomspace(least, 1, k)) @ vt, u @ vt


def scratch(like: Array) -> tuple[Array, Array, Array, Array]:
    """What an update of matrices (.., m, n) computes in."""
    shape = (like[..., 0, 0].size, *like.shape[-2:])
    gram = (shape[0], min(shape[1:]), min(shape[1:]))
    return (
        unwritten(like, *shape),
        unwritten(like, *shape),
        unwritten(like, *gram),
        unwritten(like, *gram),
    )


# A coefficient, a sign or a factor that is another: singular values that stay, run away or settle elsewhere;
# a product from the wrong side or with its factors exchanged, which turns the singular vectors. In exact
# arithmetic those stay.
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    x, orthogonal = matrix(*shape)
    x /= np.linalg.norm(x)
    x_next, _, gram, poly = (array[0] for array in scratch(x))
    for _ in range(ITERATIONS):
        iterate(x_next, gram, poly, x)
        x, x_next = x_next, x
    values = np.linalg.svd(x, compute_uv=False)
    assert values.min() > 0.67 and values.max() < 1.21, values
    assert (
        np.linalg.norm(x - orthogonal, 2) < 0.33
    )  # no singular value is further from 1, and the vectors are the same
    assert (x * orthogonal).sum() > 0.97 * np.linalg.norm(x) * np.linalg.norm(orthogonal)


def inputs(m: int, n: int) -> Arrays:
    """A matrix with a gradient and momentum as after some steps."""
    rng = np.random.default_rng([m, n])
    arrays = {"params": normal(rng, m, n), "exp_avg": 0.1 * normal(rng, m, n), "grads": matrix(m, n)[0]}
    return {**arrays, "grad_norm": np.array(0.5), "lr": np.array(1e-2)}


def run(a: Arrays, **constants: float) -> Arrays:
    """One update of copies: of a matrix, or of (layers, count, m, n)."""
    shape = a["params"].shape
    arrays = {name: a[name].copy() for name in ("params", "exp_avg", "grads")} | {
        "compute_weights": np.full(shape, np.nan, np.float32)
    }
    norm, lr = a["grad_norm"].astype(np.float64), a["lr"].astype(np.float64)
    params, exp_avg, grads, compute_weights = (
        array.reshape((1, 1, *shape)[-4:]) for array in arrays.values()
    )
    muon(params, exp_avg, grads, compute_weights, *scratch(params), norm, lr, **{**CONSTANTS, **constants})
    return arrays


def written(a: Arrays, clip: float = 1.0, weight_decay: float = 0.1) -> Arrays:
    """The post's algorithm with the paper's scale, line by line, in float64."""
    g, lr = a["grads"] * clip, float(a["lr"])
    buffer = MOMENTUM * a["exp_avg"] + (1 - MOMENTUM) * g
    x = (1 - MOMENTUM) * g + MOMENTUM * buffer
    x = (x if x.shape[0] <= x.shape[1] else x.T) / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x if x.shape == g.shape else x.T
    params = a["params"] - lr * (0.2 * np.sqrt(max(g.shape)) * x + weight_decay * a["params"])
    return {"params": params, "exp_avg": buffer}


# A momentum without the look ahead, or one that looks twice; a decay that is scaled, or acts on the gradient;
# the scale of the other side. A clip that is left out, or the wrong way round: it changes the momentum's
# direction.
@pytest.mark.parametrize(("norm", "grad_clip", "clip"), [(0.5, 1.0, 1.0), (4.0, 1.0, 0.25), (4.0, 0.0, 1.0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_update_is_the_papers(shape: tuple[int, int], norm: float, grad_clip: float, clip: float) -> None:
    a = {**inputs(*shape), "grad_norm": np.array(norm)}
    got, expected = run(a, grad_clip=grad_clip), written(a, clip)
    for name, array in expected.items():
        assert_within(name, got[name], array, 1e-12)
    assert_same_bits({"grads": got["grads"]}, {"grads": a["grads"]})
    # The weights that products read lag behind by an update, or are never written.
    assert_same_bits(
        {"compute_weights": got["compute_weights"]}, {"compute_weights": got["params"].astype(np.float32)}
    )
    assert_within("float32", run(single(a), grad_clip=grad_clip)["params"], expected["params"], 1e-5)


# An update larger for larger gradients or matrices: AdamW's learning rate would not do for both.
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e4])
def test_size_of_an_update(shape: tuple[int, int], size: float) -> None:
    a = inputs(*shape)
    a |= {
        "grads": a["grads"] * size,
        "exp_avg": np.zeros(shape),
        "params": np.zeros(shape),
        "grad_norm": np.array(0.0),
    }
    step = run(single(a))["params"].astype(np.float64) / 1e-2
    assert 0.67 * SCALE < np.sqrt(np.mean(step**2)) < 1.21 * SCALE


# 0 / 0 for a matrix that gets no gradient: NaN in the weights.
def test_no_gradient_only_decays() -> None:
    a = inputs(17, 130)
    a |= {"grads": np.zeros((17, 130)), "exp_avg": np.zeros((17, 130)), "grad_norm": np.array(0.0)}
    assert_within("params", run(a)["params"], a["params"] * (1 - 1e-2 * 0.1), 1e-15)


# One update by a gradient that overflowed spoils the weights and, for good, the momentum.
@pytest.mark.parametrize("norm", [np.nan, np.inf])
def test_nothing_changes_where_the_norm_is_not_finite(norm: float) -> None:
    a = {**inputs(17, 130), "grad_norm": np.array(norm)}
    got = run(a)
    assert np.isnan(got.pop("compute_weights")).all()
    assert_same_bits(got, {name: a[name] for name in got})


# A norm, or any other sum, whose order hangs on the number of threads.
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_same_bits_again_and_on_one_thread(shape: tuple[int, int]) -> None:
    assert_repeats(run, single(inputs(*shape)))


# A scale of another matrix, scratch that one leaves to the next, a layer taken from where it would be if they
# lay side by side.
def test_matrices_are_updated_each_by_itself() -> None:
    m, n, rng = 17, 30, np.random.default_rng(0)
    place = Matrices((3, 2, m, n), offset=9, stride=2 * m * n + 7)
    flat = {name: normal(rng, 9 + 3 * place.stride) for name in ("params", "exp_avg", "grads")}
    views = {
        name: place.view(CPU, array) * np.geomspace(1, 1e4, 6).reshape(3, 2, 1, 1)
        for name, array in flat.items()
    }
    scalars = {"grad_norm": np.array(0.5), "lr": np.array(1e-2)}
    got = run({**views, **scalars})
    for layer, i in np.ndindex(3, 2):
        alone = run({name: array[layer, i] for name, array in views.items()} | scalars)
        assert_same_bits({name: array[layer, i] for name, array in got.items()}, alone)
    for name in flat:
        place.view(CPU, flat[name])[...] = views[name]
    before, (params, exp_avg, grads) = (
        flat["params"].copy(),
        (place.view(CPU, array) for array in flat.values()),
    )
    muon(params, exp_avg, grads, None, *scratch(params), np.array(0.5), np.array(1e-2), **CONSTANTS)
    place.view(CPU, before)[...] = got["params"]
    assert_same_bits({"params": flat["params"]}, {"params": before})


# A matrix that is left out, an embedding or head that is not, a stack turned as one, rows that two matrices
# share.
@NAMES
def test_which_matrices(name: str) -> None:
    config, table = MODELS[name], parameter_table(MODELS[name])
    counts = {"qkv": 3, "proj": 1, "up": 2 if config.mlp == "swiglu" else 1, "down": 1}
    found, flat = block_matrices(config), np.zeros(flat_size(table), np.int32)
    for number, matrices in enumerate(found):
        for layer, i in np.ndindex(matrices.shape[:2]):
            matrices.view(CPU, flat)[layer, i] += 1000 + 100 * number + 10 * layer + i
    for p in table:
        part = p.name.split(".")[-2]
        hidden = p.name.startswith("blocks.") and part in counts and p.name.endswith("weight")
        rows = named(flat, [p])[p.name].reshape(p.shape[0], -1)
        assert (rows == rows[:, :1]).all() and ((rows // 1000) == hidden).all(), p.name
        assert not hidden or len(np.unique(rows)) == counts[part]
        flags = [
            OPTIMIZERS[optimizer]().flags(table)[p.offset // SEGMENT : (p.offset + p.padded_size) // SEGMENT]
            for optimizer in ("adamw", "muon")
        ]
        group = GROUPS.index(p.group) << GROUP_SHIFT
        assert (flags[0] == DECAYS * (len(p.shape) > 1) + ZERO_GRAD * (not p.linear) + group).all()
        assert (flags[1] == flags[0] + MUON * hidden).all()
    keys = named(flat, table)["blocks.1.qkv.weight"][
        config.dim : config.dim + config.kv_heads * config.head_dim, 0
    ]
    assert len(np.unique(keys)) == 1 and (named(flat, table)["blocks.0.qkv.weight"] != keys[0]).all()


def make(name: str, optimizer: str, **kind: Any) -> Engine:
    """An engine of one of the gradient check's models."""
    return Engine(
        MODELS[name],
        Numerics(),
        **{"micro_batch": 3, "threads": 1, "optimizer": OPTIMIZERS[optimizer](), **kind},
    )


def train(engine: Engine, name: str, steps: int) -> Arrays:
    """The state after updates of the same batch."""
    problem = make_problem(MODELS[name], seed=0)
    for _ in range(steps):
        engine.micro_step(problem.batch, problem.head_scale)
        engine.update(1e-2)
    return engine.state()


# What is AdamW's updated by Muon or by neither, what is Muon's by both; gradients of another matrix, or of a
# wrong part of it.
@NAMES
def test_each_parameter_by_its_optimizer(name: str) -> None:
    config = MODELS[name]
    before, table = make(name, "muon", dtype=np.float64), parameter_table(config)
    problem = make_problem(config, seed=0)
    before.micro_step(problem.batch, problem.head_scale)
    grads, start = before.gradients(), before.state()
    norm = float(np.sqrt(sum((grad**2).sum() for grad in grads.values())))
    states = [train(make(name, optimizer, dtype=np.float64), name, 1) for optimizer in ("adamw", "muon")]
    for p in (p for p in table if not p.is_block_matrix):
        for key in ("parameters", "exp_avg", "exp_avg_sq"):
            assert_same_bits(*(named(state[key], [p]) for state in states))
    flat = np.zeros(flat_size(table))
    for p in table:
        named(flat, [p])[p.name][...] = grads[p.name]
    for matrices in block_matrices(config):
        params, exp_avg, exp_avg_sq = (
            matrices.view(CPU, states[1][key]) for key in ("parameters", "exp_avg", "exp_avg_sq")
        )
        before_them, grads_of_them = matrices.view(CPU, start["parameters"]), matrices.view(CPU, flat)
        for i in np.ndindex(params.shape[:2]):
            a = {"params": before_them[i], "grads": grads_of_them[i], "lr": np.array(1e-2)}
            expected = written({**a, "exp_avg": np.zeros(params.shape[2:])}, clip=min(1.0, 1 / norm))
            # Gradients of few positions have singular values of 0, which an iteration multiplies, with their
            # rounding, by 3.4.
            assert_within(f"{matrices} {i}", params[i], expected["params"], 1e-9)
            assert_within(f"{matrices} {i}", exp_avg[i], expected["exp_avg"], 1e-14)
        assert not exp_avg_sq.any()


# A resumed run that goes another way: a momentum that is not saved, or scratch that one update leaves to the
# next. The number of threads must not matter either.
@NAMES
def test_resume_is_exact(name: str) -> None:
    whole, second = train(make(name, "muon"), name, 5), make(name, "muon", seed=9, threads=0)
    train(second, name, 1)
    second.load_state(train(make(name, "muon"), name, 2))
    assert_same_bits(train(second, name, 3), whole)


# An engine that is not told its optimizer has to be what it always was, in its numbers and in its memory.
@NAMES
def test_default_is_adamw(name: str) -> None:
    plain = Engine(MODELS[name], Numerics(), micro_batch=3, threads=1)
    assert_same_bits(train(plain, name, 2), train(make(name, "adamw"), name, 2))
    assert plain.plan_report() == make(name, "adamw").plan_report()
    assert "Muon" not in plain.describe()


# Scratch that is too small for the most matrices at once, taken in a step instead of before, or missing from
# what the plan tells.
@NAMES
def test_plan_counts_the_scratch(name: str) -> None:
    config = MODELS[name]
    adamw, muon = (
        memory_plan(config, Numerics(), 3, optimizer=OPTIMIZERS[optimizer]())
        for optimizer in ("adamw", "muon")
    )
    added = [buffer for buffer in muon if buffer not in adamw]
    assert len(muon) == len(adamw) + len(added)
    assert {buffer.name for buffer in added} == {"muon_x", "muon_gram"} and all(
        buffer.fixed for buffer in added
    )
    adamw, muon = (
        memory_plan(config, Numerics(), 3, training=False, optimizer=OPTIMIZERS[optimizer]())
        for optimizer in ("adamw", "muon")
    )
    assert adamw == muon
    assert "\n  muon  " in make(name, "muon").plan_report()
    count = sum(p.size for p in parameter_table(config) if p.is_block_matrix)
    assert f"; Muon for {count:,} of " in make(name, "muon").describe()
