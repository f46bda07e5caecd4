"""Launcher of decode_step.cu: a pass of the whole model over a few new tokens, in one kernel."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels.config import ModelConfig
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, Array, Kernel, Template
from kernels.cuda.runtime.vectors import VECTOR_BYTES

MAX_ROWS = 4
# The kernel's constants of these names.
_WARP, _WARPS, _TILE, _STEP, _SHARES, _THREADS = 32, 12, 8, 32, 4, 384
_REGIONS = (
    4,
    2,
    1,
)  # the first for which there is shared memory: the more, the further ahead weights are fetched
_STATIC_BYTES = 4096  # of shared memory, at most: the statistics of norms, and what is given

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
        logits: (B n, Vp) bf16, overwritten.
        norm: (B n, C) bf16, overwritten.
        tokens, start: (B, n) int32, as of embedding_forward.
        length: () int32: what the cache holds; like tokens and start it may be shared with the host.
        keys, values: (layers, B, context, KV, D) bf16, in/out.
        weights, parameters: by name, as products and as norms and embeddings read them; each layer's at equal distances.
        head: (Vp, C) bf16.
        table: RoPE's, or None.

    Precision: bf16 products summed in fp32; the stream is fp32, all else that a product reads, and the results, rounded to bf16.
    Determinism: bitwise repeatable on one GPU; a row's bits do not depend on how many rows there are.
    Cost: reads each weight once, and the cache's rows H / KV times (from L2 all but once). The model's sizes are the kernel's
        constants, so the kernel is compiled once for each model and number of rows.
    Memory: of its own, kept by the device, 8 bytes for each word that blocks hand over.
    """
    c = config
    assert logits.dtype == BF16 and tokens.size <= fused_rows(device, logits.dtype, c), (
        f"decode_step: {tokens.size} rows"
    )
    found = _template(c, tokens.size, device.sm_count, device.shared_bytes)
    assert found is not None
    template, shared_bytes = found
    words = device.persistent_buffer("words", 8 * _words(c)).view(np.uint64)
    tags = device.persistent_buffer("tags", 8).view(np.uint32)
    tensors: dict[str, Any] = {f"{name}_weight": parameters[f"blocks.0.{name}.weight"] for name in _NORMS} | {
        f"{name}_weight": weights[f"blocks.0.{name}.weight"] for name in _LINEARS
    }
    tensors |= {f"{name}_bias": parameters.get(f"blocks.0.{name}.bias") for name in _NORMS}
    tensors |= {f"{name}_bias": weights.get(f"blocks.0.{name}.bias") for name in _LINEARS}
    tensors |= {"norm_weight": parameters["norm.weight"], "norm_bias": parameters.get("norm.bias")}
    tensors |= {
        "token_weight": parameters["tok.weight"],
        "position_weight": parameters.get("pos.weight"),
        "head_weight": head,
    }
    arrays = (logits, norm, keys, values, *tensors.values())
    stride = _stride(c, weights, parameters)
    aligned = all(x is None or x.data.ptr % VECTOR_BYTES == 0 for x in arrays) and stride % _TILE == 0
    assert aligned and len(head) % _TILE == 0, "decode_step: an array is not aligned"
    device.launch(
        STEP, template, device.sm_count, _THREADS, shared_bytes=shared_bytes,
        logits=logits, norm=norm, tokens=tokens, start=start, length=length, keys=keys, values=values, words=words,
        tag_memory=tags, table=table, **tensors, stride=stride, layers=c.layers,
        count=tokens.shape[1], context=c.context, vocab=len(head), eps=c.norm_eps,
    )  # fmt: skip


def fused_rows(device: Device, dtype: np.dtype[Any], config: ModelConfig) -> int:
    """Most rows that decode_step takes of such a model: MAX_ROWS or none, so that a row's bits do not depend on how many come.

    None where the precision is another than bf16, a width is no multiple of 8, or a multiprocessor's shared memory does not hold
    its part of the largest product's weights beside the rows, or that part has more outputs than a block has threads for.
    """
    even = all(width % _TILE == 0 for width in (config.dim, config.ffn, config.head_dim))
    fits = dtype == BF16 and even and _template(config, MAX_ROWS, device.sm_count, device.shared_bytes)
    return MAX_ROWS if fits else 0


def _template(c: ModelConfig, rows: int, blocks: int, shared_bytes: int) -> tuple[Template, int] | None:
    """The kernel's template arguments and its bytes of shared memory; None where it does not fit."""
    sizes = (blocks, c.dim, c.heads, c.kv_heads, c.head_dim, c.ffn, c.position == "rope", c.mlp == "swiglu")
    if any(most * rows * _TILE // 2 > _THREADS for most, _, _ in _products(c, blocks)):
        return None
    for regions in _REGIONS:
        size = _shared_bytes(c, rows, regions, blocks)
        if size <= shared_bytes - _STATIC_BYTES:
            return (rows, regions, size, *sizes), size
    return None


def _products(c: ModelConfig, blocks: int) -> list[tuple[int, int, int]]:
    """Of each of a layer's products a block's most tiles and items, and the bytes of its weights, as the kernel has them."""
    width, up = (c.heads + 2 * c.kv_heads) * c.head_dim, c.ffn * (2 if c.mlp == "swiglu" else 1)
    found = []
    for outputs, inputs in ((width, c.dim), (c.dim, c.dim), (up, c.dim), (c.dim, c.ffn)):
        most, steps = -(-outputs // (_TILE * blocks)), -(-inputs // _STEP)
        of_item = -(-steps // max(1, min(_WARPS // most, steps)))
        found.append((most, most * -(-steps // of_item), most * _TILE * _row_bytes(inputs)))
    return found


def _row_bytes(inputs: int) -> int:
    """Of a row of inputs or of weights in shared memory."""
    return (-(-inputs // 64) * 64 + 32) * BF16.itemsize


def _shared_bytes(c: ModelConfig, rows: int, regions: int, blocks: int) -> int:
    """The regions of weights, the items' sums, and the input rows or what attention works with."""
    products = _products(c, blocks)
    weights = sum(max(size for _, _, size in products[region::regions]) for region in range(regions))
    steps = -(-c.dim // _STEP)
    weights = max(
        weights, _WARPS * next(group for group in (4, 2, 1) if steps % group == 0) * _WARP * VECTOR_BYTES
    )
    sums, inputs = (
        max(items for _, items, _ in products) * rows * _TILE * 4,
        rows * _row_bytes(max(c.dim, c.ffn)),
    )
    shares = (1 + 2 * rows) * c.head_dim * 2 + _WARPS * (c.head_dim + 2) * 4
    return weights + sums + max(inputs, shares)


def _words(c: ModelConfig) -> int:
    """What is handed over: what is given, the stream, qkv, act, and of each share m and l, and o."""
    row = (
        c.dim
        + (c.heads + 2 * c.kv_heads) * c.head_dim // 2
        + c.ffn // 2
        + c.heads * _SHARES * (2 + c.head_dim)
    )
    return 2 + MAX_ROWS * (2 + row)


def _stride(c: ModelConfig, weights: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    """Elements from a tensor of one layer to that of the next, the same for all of them."""
    distances = {
        (tensors[name.replace(".0.", f".{i}.", 1)].data.ptr - tensors[name].data.ptr)
        / (tensors[name].itemsize * i)
        for tensors, parts in ((weights, _LINEARS), (parameters, _NORMS))
        for name in (f"blocks.0.{part}.{kind}" for part in parts for kind in ("weight", "bias"))
        if name in tensors
        for i in range(1, c.layers)
    }
    assert len(distances) <= 1, f"decode_step: layers lie at unequal distances, {distances}"
    return int(distances.pop()) if distances else 0


def _examples() -> tuple[Template, ...]:
    """Of the many instances those that are compiled by tests: of GPT-2 and of an Euler model, and on GPUs that hold less."""
    gpt2 = ModelConfig(
        50257, 12, 12, 12, 768, 3072, 1024, norm="layernorm", position="learned", mlp="gelu", bias=True
    )
    euler = ModelConfig(4096, 16, 12, 4, 768, 2048, 512)
    small = ModelConfig(512, 4, 4, 2, 128, 344, 128)
    of_gpt2 = ((gpt2, 1, 132, 227), (gpt2, 4, 132, 227), (gpt2, 1, 128, 99), (gpt2, 4, 128, 99))
    cases = (*of_gpt2, (euler, 1, 132, 227), (small, 3, 28, 99))
    found = [_template(c, rows, blocks, kib * 1024) for c, rows, blocks, kib in cases]
    assert all(found), "decode_step: an example does not fit"
    return tuple(one[0] for one in found if one)


STEP = Kernel("decode/decode_step.cu", "decode_step", _examples(), open=True)
