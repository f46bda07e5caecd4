"""The memory plan and the arena."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest

from kernels.arena import ALIGNMENT_BYTES, Arena, Buffer, plan_bytes
from kernels.config import ModelConfig, Numerics
from kernels.cpu import CpuOps
from kernels.fp8 import block_weights
from kernels.kv_cache import TokenIO
from kernels.memory import activation_plan, check_fits, memory_plan, parameter_plan, report, total_bytes
from kernels.optimizers import OPTIMIZERS
from kernels.parameters import SEGMENT, flat_size, parameter_table
from kernels.split import one_rank
from tests.gradient_check import MODELS

FLOAT32 = np.dtype(np.float32)


def arena_of(plan: list[Buffer]) -> tuple[Arena, np.ndarray]:
    """An arena and the memory that it asked for."""
    memory = np.zeros(plan_bytes(plan), np.uint8)
    return Arena(plan, memory), memory


def full_plan(config: ModelConfig, *, training: bool = True, recompute: bool = False) -> list[Buffer]:
    """Parameters and activations of 6 rows."""
    numerics = Numerics(recompute="mlp" if recompute else "none")
    plan = parameter_plan(parameter_table(config), one_rank(1024), training=training, dtype=FLOAT32)
    return plan + activation_plan(config, numerics, 6, training=training, dtype=FLOAT32)


# Two buffers that share a byte: gradients that change with an activation. Every byte is counted, none twice,
# and vectors are loaded from each buffer's beginning.
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_buffers_are_apart_and_counted(name: str, training: bool) -> None:
    plan = full_plan(MODELS[name], training=training)
    arena, memory = arena_of(plan)
    total = sum(buffer.total_bytes for buffer in plan)
    assert total <= len(memory) <= total + ALIGNMENT_BYTES
    used = 0
    for buffer in plan:
        for layer in range(buffer.layers):
            view = arena.view(buffer.name, buffer.shape, layer)
            assert not view.any(), f"{buffer.name} {layer} overlaps"
            assert (view.ctypes.data - memory.ctypes.data) % ALIGNMENT_BYTES == 0
            view[...] = 1
            used += view.size * int(np.count_nonzero(np.ones(1, view.dtype).view(np.uint8)))
    assert np.count_nonzero(memory) == used


# A view of fewer rows must be the buffer's beginning, not a copy: the last, smaller batch of an evaluation.
def test_view_of_fewer_rows() -> None:
    arena, _ = arena_of([Buffer("a", "k", (6, 5), FLOAT32, 2), Buffer("b", "k", (3,), FLOAT32)])
    arena.view("a", (2, 5), 1)[...] = 7
    np.testing.assert_array_equal(arena.view("a", (6, 5), 1)[:2], np.full((2, 5), 7))
    assert not arena.view("a", (6, 5), 1)[2:].any()
    assert not arena.view("a", (6, 5), 0).any()


# A buffer that layers share is the same for each of them; one that they don't is not.
def test_shared_buffers() -> None:
    arena, _ = arena_of([Buffer("own", "k", (4,), FLOAT32, 3), Buffer("shared", "k", (4,), FLOAT32)])
    assert np.shares_memory(arena.view("shared", (4,), 0), arena.view("shared", (4,), 2))
    assert not np.shares_memory(arena.view("own", (4,), 0), arena.view("own", (4,), 2))


# Without training neither gradients nor moments nor an activation a layer: a chat would need a trainer's
# memory.
@pytest.mark.parametrize("name", MODELS)
def test_inference_holds_one_layer(name: str) -> None:
    deep = dataclasses.replace(MODELS[name], layers=9)
    plan = full_plan(deep, training=False)
    assert all(buffer.layers == 1 for buffer in plan)
    assert {buffer.kind for buffer in plan} == {"parameters", "activations", "logits"}
    trained = {buffer.name: buffer.layers for buffer in full_plan(deep)}
    for kept in (
        "residual1",
        "norm1",
        "qkv",
        "attended",
        "residual2",
        "norm2",
        "up",
        "act",
        "lse",
        "norm1_rstd",
    ):
        assert trained[kept] == 9, kept


# Recomputing must save what it computes again: one ffn-wide buffer a layer.
def test_recompute_saves_the_hidden_activations() -> None:
    plans = [full_plan(MODELS["euler"], recompute=recompute) for recompute in (False, True)]
    full, less = (sum(buffer.total_bytes for buffer in plan) for plan in plans)
    act = next(buffer for buffer in plans[0] if buffer.name == "act")
    assert act.layers == 2
    assert full - less == act.layer_bytes


# A report whose sum or unit is wrong; sizes here by hand: 3 x 1 MiB and 2 layers of half a MiB.
def test_report() -> None:
    plan = [
        Buffer("a", "parameters", (3 * 2**18,), FLOAT32),
        Buffer("b", "activations", (2**10, 2**7), FLOAT32, 2),
        Buffer("c", "activations", (1,), FLOAT32),
    ]
    lines = [line.split() for line in report(plan).splitlines()]
    assert lines == [["parameters", "3.0", "MiB"], ["activations", "1.0", "MiB"], ["total", "4.0", "MiB"]]
    assert plan[2].layer_bytes == ALIGNMENT_BYTES
    assert math.prod(plan[1].shape) * 4 == plan[1].layer_bytes


# A plan that swaps for hours, or a traceback of the allocator, where a smaller batch would have done.
def test_what_does_not_fit_is_refused_with_what_would() -> None:
    config = ModelConfig(64, 2, 2, 1, 16, 32, 16)
    plan = memory_plan(config, Numerics(), 8)
    needed = sum(buffer.total_bytes for buffer in plan)
    check_fits(plan, 8, needed)
    with pytest.raises(ValueError, match=r"micro_batch=8 needs .* GiB, .*; micro_batch=4 fits"):
        check_fits(plan, 8, sum(buffer.total_bytes for buffer in memory_plan(config, Numerics(), 4)))
    with pytest.raises(ValueError, match="no micro_batch fits"):
        check_fits(plan, 8, 1000)


# Host and device each with memory of its own: the device would read a token that was never written.
def test_token_io_is_one_memory() -> None:
    token_io = TokenIO(MODELS["euler"], CpuOps(), 3)
    token_io.host.view("inputs", (7,), 1)[...] = 1
    token_io.host.view("uniform", (3,), 1)[...] = 2
    np.testing.assert_array_equal(token_io.device.view("inputs", (7,), 1), np.ones(7))
    np.testing.assert_array_equal(token_io.device.view("uniform", (2,), 1), [2, 2])


# Casts that overlap or are not counted; a layer's inputs that the next one's overwrite, or that are kept
# twice.
@pytest.mark.parametrize("name", MODELS)
def test_fp8_is_counted(name: str) -> None:
    config = dataclasses.replace(MODELS[name], context=50)
    products, layers = block_weights(parameter_table(config)), config.layers
    assert len(products) == 4 * layers
    for before, after in pairwise(products):
        assert before.offset % SEGMENT == 0
        assert before.offset + before.size <= after.offset

    def planned(numerics: Numerics, training: bool = True) -> dict[str, Buffer]:
        return {
            b.name: b
            for b in memory_plan(config, numerics, 3, training=training, storage=np.dtype(np.uint16))
        }

    plain, plan = planned(Numerics(precision="bf16")), planned(Numerics(precision="fp8"))
    assert planned(Numerics(precision="bf16"), training=False) == planned(
        Numerics(precision="fp8"), training=False
    )
    assert {buffer.name for buffer in plan.values() if plain.get(buffer.name) != buffer} == {
        "norm1", "norm2", "act", "fp8_weights", "fp8_transposed", "fp8_scales", "fp8_amax",
        *(f"fp8_inp_{linear}" for linear in ("qkv", "proj", "up", "down")),
    }  # fmt: skip
    assert plan["fp8_weights"].total_bytes >= sum(p.size for p in products)
    assert (plan["norm1"].layers, plan["norm2"].layers, plan["act"].layers) == (1, 1, 1)
    for linear, width in (
        ("qkv", config.dim),
        ("proj", config.dim),
        ("up", config.dim),
        ("down", config.ffn),
    ):
        assert (plan[f"fp8_inp_{linear}"].shape, plan[f"fp8_inp_{linear}"].layers) == ((160 * width,), layers)
    assert (plan["fp8_scales"].shape, plan["fp8_amax"].shape) == ((4 * layers, 3, 4), (4 * layers, 2))


# A rank whose plan is that of a whole model, or one that lacks what it needs; a model that needs two GPUs, of
# which nobody says so.
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_rank_holds_its_part(optimizer: str) -> None:
    config = ModelConfig(
        5000, 6, 6, 6, 384, 1536, 64, norm="layernorm", mlp="gelu", bias=True, tied_head=True
    )
    numerics, kind = Numerics(precision="bf16"), OPTIMIZERS[optimizer]()

    def plan_of(ranks: int) -> list[Buffer]:
        split = kind.split(config, 16384, ranks=ranks)
        return memory_plan(config, numerics, 1, storage=np.dtype(np.uint16), optimizer=kind, split=split)

    bytes_of = [{buffer.name: buffer.total_bytes for buffer in plan_of(ranks)} for ranks in (1, 4)]
    count = flat_size(parameter_table(config))
    for name, each in (("exp_avg", 4), ("exp_avg_sq", 4), ("parameters", 4)):
        assert bytes_of[0][name] == pytest.approx(each * count, rel=0.01)
        assert bytes_of[1][name] == pytest.approx(each * count / 4, rel=0.4), (
            name
        )  # Muon cuts between matrices
    for name in ("weights", "gradients"):
        assert bytes_of[1][name] == pytest.approx(bytes_of[0][name], rel=0.01)
    stream = 4 * sum(p.size for p in parameter_table(config) if not p.is_block_matrix)
    assert bytes_of[1]["stream_weights"] == pytest.approx(stream, rel=0.01)
    assert "stream_weights" not in bytes_of[0]
    whole, part = (total_bytes(plan_of(ranks)) for ranks in (1, 4))
    assert part < whole
    with pytest.raises(ValueError, match="on 4 GPUs this micro_batch fits"):
        check_fits(plan_of(1), 1, max(part, total_bytes(plan_of(4))), plan_of)
    with pytest.raises(ValueError) as refused:
        check_fits(plan_of(1), 1, 1000, plan_of)
    assert "GPUs" not in str(refused.value)
