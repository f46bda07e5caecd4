"""The parameter table, the initial weights and the order of the transformer's backward pass."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from kernels.arena import Arena, plan_bytes
from kernels.config import ModelConfig, Numerics
from kernels.cpu import CpuOps
from kernels.kv_cache import new_cache
from kernels.memory import activation_plan
from kernels.model import Transformer
from kernels.optimizers import AdamW
from kernels.parameters import (
    DECAYS,
    GROUP_SHIFT,
    GROUPS,
    INIT_DIM,
    INIT_STD,
    RANKS,
    SEGMENT,
    ZERO_GRAD,
    flat_size,
    initial_weights,
    named,
    parameter_table,
)
from kernels.parts.tensors import Tensors
from tests.gradient_check import MODELS

GPT2 = ModelConfig(
    vocab_size=50257, layers=12, heads=12, kv_heads=12, dim=768, ffn=3072, context=1024,
    norm="layernorm", position="learned", mlp="gelu", bias=True, tied_head=True,
)  # fmt: skip


# Two parameters that share an element, a padding that does not divide among ranks, or a view that is a copy.
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_apart(name: str) -> None:
    table = parameter_table(MODELS[name])
    assert len({p.name for p in table}) == len(table)
    flat = np.zeros(flat_size(table), np.float32)
    assert len(flat) % (SEGMENT * RANKS) == 0
    for p, view in zip(table, named(flat, table).values(), strict=True):
        assert p.offset % SEGMENT == 0
        assert view.shape == p.shape
        assert not view.any(), p.name
        view[...] = 1
    assert flat.sum() == sum(p.size for p in table)


# GPT-2 124M as published, with the vocabulary padded to 50,304: a layer forgotten or a head that is not tied
# shows here.
def test_count_of_gpt2() -> None:
    published = 124_439_808
    assert sum(p.size for p in parameter_table(GPT2)) == published + (50304 - 50257) * 768


# euler_1m by hand: a factor 2 forgotten in a SwiGLU or in the key/value heads.
def test_count_of_euler() -> None:
    config = ModelConfig(
        vocab_size=512, layers=4, heads=4, kv_heads=2, dim=128, ffn=344, context=128, mtp_heads=4
    )
    layer = (128 + 2 * 64) * 128 + 128 * 128 + 3 * 344 * 128 + 2 * 128
    assert sum(p.size for p in parameter_table(config)) == 5 * 512 * 128 + 4 * layer + 128


# Weight decay on a norm or a bias; a gradient that the next update adds to, or one that is cleared though it
# is overwritten; a norm that learns at the embedding's rate.
@pytest.mark.parametrize("name", MODELS)
def test_what_an_update_does_with_a_run(name: str) -> None:
    table = parameter_table(MODELS[name])
    flags = np.repeat(AdamW().flags(table), SEGMENT)
    for p in table:
        matrix = p.name.endswith(".weight") and "norm" not in p.name
        embedding = p.name == "pos.weight" or (p.name == "tok.weight" and not MODELS[name].tied_head)
        expected = DECAYS * matrix + ZERO_GRAD * (not matrix or embedding)
        kinds = {"head.weight": "head", "tok.weight": "embedding", "pos.weight": "embedding"}
        kind = kinds.get(p.name, "matrix" if matrix else "vector")
        expected += GROUPS.index(kind) << GROUP_SHIFT
        assert (flags[p.offset : p.offset + p.size] == expected).all(), p.name


# GPT-2's spread at its width, kept for others so that a product's variance is the same; smaller where
# branches are added.
def test_initial_weights() -> None:
    config = dataclasses.replace(MODELS["gpt2"], dim=120, ffn=250, heads=5, kv_heads=5, mtp_heads=2)
    weights = initial_weights(config, seed=3)
    std = INIT_STD * (INIT_DIM / 120) ** 0.5
    for name, weight in weights.items():
        drawn = weight[..., :61, :] if name in ("tok.weight", "head.weight") else weight
        if "norm" in name or name.endswith("bias"):
            assert (weight == (1 if name.endswith("weight") else 0)).all(), name
            continue
        expected = std / 2 if name.endswith(("down.weight", "proj.weight")) else std  # sqrt(2 * 2 layers) = 2
        # The estimate's own spread is expected / sqrt(2 n); five of them.
        assert abs(drawn.std() - expected) < 5 * expected / (2 * drawn.size) ** 0.5, name
        assert abs(drawn.mean()) < 5 * expected / drawn.size**0.5, name


# Another seed that gives the same weights, or two tensors that do: their gradients would be alike.
def test_every_tensor_has_its_own_stream() -> None:
    first, again, other = (initial_weights(MODELS["euler"], seed) for seed in (0, 0, 1))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert "norm" in name or (first[name] != other[name]).any()
    assert (first["blocks.0.qkv.weight"] != first["blocks.1.qkv.weight"]).all()


# Comparing vocabularies would compare initial weights too.
def test_another_vocabulary_leaves_the_blocks() -> None:
    first = initial_weights(MODELS["euler"], 0)
    other = initial_weights(dataclasses.replace(MODELS["euler"], vocab_size=300), 0)
    for name in first:
        if name.startswith("blocks"):
            np.testing.assert_array_equal(first[name], other[name])


# Padding rows that begin with weights would take part in nothing but the norm, and decay.
@pytest.mark.parametrize("name", MODELS)
def test_padding_rows_begin_at_zero(name: str) -> None:
    weights = initial_weights(MODELS[name], 0)
    for vocabulary in {"tok.weight", "head.weight"} & weights.keys():
        assert not weights[vocabulary][..., 61:, :].any()
        assert weights[vocabulary][..., :61, :].all(axis=-1).all()


class Recorder(dict[str, Any]):
    """Gradients that note the order in which they are asked for."""

    def __init__(self, grads: dict[str, Any]) -> None:
        super().__init__(grads)
        self.order: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.order.append(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.keys() else default


# The flat gradient is reduced among ranks while backward still runs: one that is finished later would be
# reduced too early.
@pytest.mark.parametrize("name", MODELS)
def test_table_is_in_the_order_of_backward(name: str) -> None:
    config, ops = MODELS[name], CpuOps()
    table = parameter_table(config)
    weights = {key: value.astype(np.float32) for key, value in initial_weights(config, 0).items()}
    grads = Recorder(named(np.zeros(flat_size(table), np.float32), table))
    plan = activation_plan(config, Numerics(), 10, training=True, dtype=ops.dtype)
    arena = Arena(plan, ops.allocate(plan_bytes(plan)))
    model = Transformer(Tensors(config, Numerics(), ops, arena, weights, weights, {}, grads))
    tokens, start = np.arange(10, dtype=np.int32).reshape(2, 5), np.zeros((2, 5), np.int32)
    norm = model.forward(tokens, start)
    dnorm = np.empty_like(norm)
    for k in range(config.mtp_heads):
        model.head_backward(dnorm, k, model.head_logits(k, norm), norm, accumulate=False)
    model.backward(dnorm, tokens, start, accumulate=False)
    finished = list(dict.fromkeys(reversed(grads.order)))[::-1]

    def layers(names: list[str]) -> list[str]:
        """Without what stands within a layer: weight and bias, and the two embeddings, are finished
        together.
        """
        return [name.rpartition(".")[0].replace("pos", "tok") for name in names]

    assert layers(finished) == layers([p.name for p in sorted(table, key=lambda p: p.offset)])


# A cache that forgets more than it should, or the wrong end.
def test_cache_truncate() -> None:
    config = ModelConfig(vocab_size=9, layers=1, heads=1, kv_heads=1, dim=2, ffn=4, context=4)
    cache = new_cache(config, CpuOps(), 1)
    cache.length = 3
    cache.truncate(2)
    assert cache.length == 2
    with pytest.raises(AssertionError):
        cache.truncate(3)
