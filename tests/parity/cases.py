"""Models at odd sizes, trained a little and scaled up; what they are exported to; and a text to train on."""

import argparse
import difflib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from kernels.batch import Batch, head_weight_sums
from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine
from stages.checkpoint import Checkpoint
from stages.export import export
from stages.tokenizer import Tokenizer

VOCAB, CONTEXT, ROWS = 300, 7, 5
SPECIAL = ("<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
EULER = ModelConfig(VOCAB, layers=3, heads=3, kv_heads=1, dim=120, ffn=88, context=CONTEXT, mtp_heads=3)
GPT2 = replace(
    EULER,
    kv_heads=3,
    mtp_heads=1,
    norm="layernorm",
    position="learned",
    mlp="gelu",
    bias=True,
    tied_head=True,
)
QWEN3 = replace(EULER, mtp_heads=1, tied_head=True, qk_norm="weighted")
MODELS = {"euler": EULER, "gpt2": GPT2, "qwen3": QWEN3}
CLASSES = {"euler": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "qwen3": "Qwen3ForCausalLM"}
# Linear weights, embeddings and biases times this: scores times its square, so that attention looks at few
# tokens.
SCALE = 4.0
UPDATES, TRAIN_ROWS = 60, 32

Weights = dict[str, np.ndarray]


@cache
def text() -> str:
    """Sources of Python's own library: real text that every machine has."""
    return "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (argparse, difflib))


@cache
def tokenizer() -> Tokenizer:
    """Learned from the text."""
    return Tokenizer.train([text()], VOCAB, SPECIAL)


def engine_with(config: ModelConfig, weights: Weights | None = None, rows: int = ROWS, **kind: Any) -> Engine:
    """An engine with these weights."""
    engine = Engine(config, Numerics(), micro_batch=rows, threads=1, **kind)
    if weights is not None:
        engine.load(weights)
    return engine


def rows_of(ids: np.ndarray, rows: int, length: int) -> Batch:
    """The first rows * length tokens row by row, each with the token that follows as its target."""
    shape = (rows, length)
    tokens, targets = (ids[shift : rows * length + shift].reshape(shape).astype(np.int32) for shift in (0, 1))
    return Batch(tokens, targets, np.zeros(shape, np.int32), np.ones(shape, np.float32))


def train(engine: Engine, ids: np.ndarray, updates: int, lr: float) -> None:
    """Updates over the ids in order, heads weighted alike."""
    c, rows = engine.config, engine.micro_batch
    for step in range(updates):
        batch = rows_of(ids[step * rows * c.context :], rows, c.context)
        engine.micro_step(batch, 1 / head_weight_sums(batch, c.mtp_heads))
        engine.update(lr)


@cache
def trained(config: ModelConfig) -> Weights:
    """Weights after UPDATES updates on the text, by which biases and norms have left where they began."""
    engine = engine_with(config, rows=TRAIN_ROWS)
    train(engine, tokenizer().encode(text()), UPDATES, 3e-3)
    return engine.weights()


@cache
def scaled_up(config: ModelConfig) -> Weights:
    """The trained weights times SCALE, norms as they are."""
    return {name: w * np.float32(1 if "norm" in name else SCALE) for name, w in trained(config).items()}


def exported(config: ModelConfig, weights: Weights, folder: Path, kind: str = "chat") -> Any:
    """The model as transformers loads it from our export, float32, its further heads beside it."""
    export(Checkpoint(weights, config, tokenizer().sha256), tokenizer(), folder, kind=kind)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not [names for names in loading.values() if names], loading
    name = next(name for name in MODELS if MODELS[name].position == config.position
                and MODELS[name].qk_norm == config.qk_norm)  # fmt: skip
    assert type(model).__name__ == CLASSES[name]
    return model.eval()


class ExactRope(torch.nn.Module):
    """Llama's cosines and sines in float64."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.frequency = config.rope_base ** (
            -torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        )

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (B, T, D), each frequency twice."""
        angle = position_ids[..., None].double() * self.frequency
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


def in_float64(model: Any, config: ModelConfig) -> Any:
    """An exported model that computes in float64 throughout.

    transformers takes RMSNorm and RoPE of a Llama to float32 whatever the model's precision; they are
    replaced.
    """
    model = model.double()
    if config.position == "rope":
        model.model.rotary_emb = ExactRope(config)
        for layer in model.model.layers:
            layer.input_layernorm = exact_norm(layer.input_layernorm, config)
            layer.post_attention_layernorm = exact_norm(layer.post_attention_layernorm, config)
            if config.qk_norm != "none":
                layer.self_attn.q_norm = exact_norm(layer.self_attn.q_norm, config)
                layer.self_attn.k_norm = exact_norm(layer.self_attn.k_norm, config)
        model.model.norm = exact_norm(model.model.norm, config)
    return model


def exact_norm(norm: Any, config: ModelConfig) -> torch.nn.RMSNorm:
    """PyTorch's own RMSNorm with the weight of transformers'."""
    exact = torch.nn.RMSNorm(norm.weight.shape, config.norm_eps, dtype=torch.float64)
    exact.weight = norm.weight
    return exact


def our_logits(engine: Engine, tokens: np.ndarray, head: int = 0) -> np.ndarray:
    """(B, T, V) of one prediction head, as training computes them."""
    model, start = engine._model, np.zeros(tokens.shape, np.int32)
    rows = model.head_logits(head, model.forward(tokens, start))
    return rows[:, : engine.config.vocab_size].reshape(*tokens.shape, -1).copy()
