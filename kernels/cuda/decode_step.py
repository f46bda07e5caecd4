"""Launcher of decode_step.cu: a pass of the whole model over a few new tokens, in one kernel."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels.config import ModelConfig
from kernels.cuda.decode_attention import LARGEST_HEAD_DIM
from kernels.cuda.device import Device
from kernels.cuda.launch import Array, Kernel
from kernels.cuda.vectors import VECTOR_BYTES, VECTOR_TEMPLATES, vector_size

MOST_ROWS = 4
_FEATURES = (64, LARGEST_HEAD_DIM)  # most of a head: the fewer there are, the more keys are on their way at once
_INSTANCES = ((*t, rows, most) for t in VECTOR_TEMPLATES for rows in range(1, MOST_ROWS + 1) for most in _FEATURES)
_STEP = Kernel("decode_step.cu", "decode_step", tuple(_INSTANCES))
_WARP, _DEPTH, _SHARES, _LANES, _AHEAD = 32, 8, 4, 8, 2  # the kernel's, LANES the fewest, AHEAD the most
_STATIC_BYTES = 4096  # of shared memory, at most: the kernel's Block
# Threads of a block, the first whose shared memory there is; more have more weights under way. Not tuned, but no fewer than the
# kernel's LARGEST_HEAD_DIM: take_fresh would not end.
_THREADS = (512, 256, 128)

_NORMS, _LINEARS = ("norm1", "norm2"), ("qkv", "proj", "up", "down")


def decode_step(
    device: Device,
    logits: Array,
    norm: Array,
    tokens: Array,
    start: Array,
    length: Array,
    keys: Array,
    values: Array,
    weights: Mapping[str, Array],
    parameters: Mapping[str, Array],
    head: Array,
    table: Array | None,
    *,
    config: ModelConfig,
) -> None:
    """The final normalised stream and one head's logits of tokens (B, n) behind a cache, and their keys and values into it.

    Args:
        logits: (B n, Vp), overwritten.
        norm: (B n, C), overwritten.
        tokens, start: (B, n) int32, as of embedding_forward.
        length: () int32: what the cache holds; like tokens and start it may be shared with the host.
        keys, values: (layers, B, context, KV, D), in/out.
        weights, parameters: by name, as products and as norms and embeddings read them; each layer's at equal distances.
        head: (Vp, C).
        table: RoPE's, or None.

    Precision: fp32 arithmetic; keys, values, the MLP's hidden row and the results are rounded to T.
    Determinism: bitwise repeatable on one GPU; a row's bits do not depend on how many rows there are.
    Cost: reads each weight once, and the cache's rows H / KV times (from L2 all but once).
    Memory: of its own, kept by the device, 8 bytes for each number that blocks hand over.
    """
    c, dtype = config, logits.dtype
    assert tokens.size <= fused_rows(device, dtype, config), f"decode_step: {tokens.size} rows"
    words = device.kept("words", 8 * _words(c)).view(np.uint64)
    tags = device.kept("tags", 8).view(np.uint32)
    tensors: dict[str, Any] = {f"{name}_weight": parameters[f"blocks.0.{name}.weight"] for name in _NORMS} | {
        f"{name}_weight": weights[f"blocks.0.{name}.weight"] for name in _LINEARS
    }
    tensors |= {f"{name}_bias": parameters.get(f"blocks.0.{name}.bias") for name in _NORMS}
    tensors |= {f"{name}_bias": weights.get(f"blocks.0.{name}.bias") for name in _LINEARS}
    tensors |= {"norm_weight": parameters["norm.weight"], "norm_bias": parameters.get("norm.bias")}
    tensors |= {"token_weight": parameters["tok.weight"], "position_weight": parameters.get("pos.weight"), "head_weight": head}
    size = _size(c, dtype)
    assert size == 1 or vector_size(size, logits, *tensors.values(), keys, values) == size, "decode_step: an array is not aligned"
    threads = _threads(device, c, dtype)
    device.launch(
        _STEP, (dtype, size, tokens.size, next(most for most in _FEATURES if c.head_dim <= most)), device.processors, threads,
        shared_bytes=_shared_bytes(device, c, dtype, threads), logits=logits, norm=norm, tokens=tokens, start=start,
        length=length, keys=keys, values=values, words=words, tag_memory=tags, table=table,
        **tensors, stride=_stride(c, weights, parameters), layers=c.layers,
        count=tokens.shape[1], context=c.context, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, ffn=c.ffn,
        vocab=len(head), gated=c.mlp == "swiglu", eps=c.norm_eps, row_floats=_row_floats(c, threads),
    )  # fmt: skip


def fused_rows(device: Device, dtype: np.dtype[Any], config: ModelConfig) -> int:
    """Most rows that decode_step takes of such a model; 0 where shared memory does not hold what it needs."""
    return MOST_ROWS if config.head_dim <= LARGEST_HEAD_DIM and _threads(device, config, dtype) else 0


def _words(c: ModelConfig) -> int:
    """Numbers that are handed over: the stream, qkv, act, and of each share m and l, and o."""
    return MOST_ROWS * (2 * c.dim + 2 * c.kv_heads * c.head_dim + c.ffn + c.heads * _SHARES * (2 + c.head_dim)) + 1


def _size(c: ModelConfig, dtype: np.dtype[Any]) -> int:
    """Elements of a vector: 16 bytes of them, where every row and head divides by it."""
    size = VECTOR_BYTES // dtype.itemsize
    return size if all(width % size == 0 for width in (c.dim, c.ffn, c.head_dim)) else 1


def _threads(device: Device, c: ModelConfig, dtype: np.dtype[Any]) -> int:
    """Threads of a block, whatever the rows, since the order of sums depends on them; 0 where none fits."""
    allowed = (threads for threads in _THREADS if threads < _THREADS[0] or _size(c, dtype) > 1)
    return next((n for n in allowed if _shared_bytes(device, c, dtype, n) <= device.shared_bytes - _STATIC_BYTES), 0)


def _row_floats(c: ModelConfig, threads: int) -> int:
    """Of the rows that a product reads, or of what make_shares works with."""
    shares = (1 + 2 * MOST_ROWS) * c.head_dim + 2 * _AHEAD * threads // _LANES + threads // _WARP * (c.head_dim + 1)
    return max(MOST_ROWS * max(c.dim, c.ffn), shares)


def _shared_bytes(device: Device, c: ModelConfig, dtype: np.dtype[Any], threads: int) -> int:
    """The ring of weights, the input rows, and the elements of the stream that a block owns."""
    owned = -(-c.dim // (2 * device.processors)) * 2 * MOST_ROWS
    return _DEPTH * 2 * threads * _size(c, dtype) * dtype.itemsize + 4 * (_row_floats(c, threads) + owned)


def _stride(c: ModelConfig, weights: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    """Elements from a tensor of one layer to that of the next, the same for all of them."""
    distances = {
        (tensors[name.replace(".0.", f".{i}.", 1)].data.ptr - tensors[name].data.ptr) / (tensors[name].itemsize * i)
        for tensors, parts in ((weights, _LINEARS), (parameters, _NORMS))
        for name in (f"blocks.0.{part}.{kind}" for part in parts for kind in ("weight", "bias"))
        if name in tensors
        for i in range(1, c.layers)
    }
    assert len(distances) <= 1, f"decode_step: layers lie at unequal distances, {distances}"
    return int(distances.pop()) if distances else 0
