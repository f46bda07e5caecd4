"""Launcher of decode_step.cu: one launch takes a few new tokens through the whole model."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels.config import ModelConfig
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Kernel, Template, constants
from kernels.cuda.runtime.vectors import VECTOR_BYTES

_SOURCE = "decode/decode_step.cu"
_C = constants(_SOURCE)
MAX_ROWS = 4  # an MMA has room for 8 rows; not tuned
# Prefetch regions of weights in shared memory, most first. The first choice that fits is taken.
_REGIONS = (4, 2, 1)
_STATIC_BYTES = 4096  # at least the kernel's static shared memory: statistics of the norms, inputs, mbarriers

_NORMS, _QK_NORMS = ("norm1", "norm2"), ("q_norm", "k_norm")
_LINEARS = ("qkv", "proj", "up", "down")
# A head's lanes hold 8 elements each. They are a power of two within one warp, and at least two: a lane's
# partners in RoPE are another lane's elements.
_QK_NORM_HEAD_DIMS = (16, 32, 64, 128, 256)


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
    """Append tokens (B, n) to a cache: their final normalised stream and the first head's logits.

    Args:
        logits: (B n, Vp) bf16, overwritten.
        norm: (B n, C) bf16, overwritten.
        tokens, start: (B, n) int32, as in embedding_forward; every element of start is -length.
        length: () int32, the number of cached tokens. It may lie in host memory, as may tokens and start.
        keys, values: (layers, B, context, KV, D) bf16, in/out.
        weights: by name, what matmuls read: bf16. The stride from a layer's
            tensor to the next layer's is the same for all.
        parameters: by name, what norms and embeddings read: fp32, with the same stride in elements.
        head: (Vp, C) bf16.
        table: of RoPE, or None.

    Precision: bf16 MMAs with fp32 sums; fp32 stream. All else that a matmul reads, and the results, are bf16.
    Determinism: bitwise repeatable on one GPU; the bits of a row do not depend on the number of rows.
    Cost: reads each weight once, and each cached key and value H / KV times, once from DRAM and otherwise
        from L2. The model's sizes are template arguments: each model and number of rows is compiled by
        itself.
    Memory: the device keeps a buffer of 8 bytes for each word that blocks exchange.
    """
    c = config
    assert logits.dtype == BF16 and tokens.size <= decode_step_rows(device, logits.dtype, c), (
        f"decode_step: {tokens.size} rows"
    )
    found = _template(c, tokens.size, device.sm_count, device.shared_bytes)
    assert found is not None
    template, shared_bytes = found
    words = device.persistent_buffer("words", 8 * _words(c)).view(np.uint64)
    tag_counter = device.persistent_buffer("tags", 8).view(np.uint32)
    tensors: dict[str, Any] = {f"{name}_weight": parameters[f"blocks.0.{name}.weight"] for name in _NORMS} | {
        f"{name}_weight": weights[f"blocks.0.{name}.weight"] for name in _LINEARS
    }
    tensors |= {f"{name}_bias": parameters.get(f"blocks.0.{name}.bias") for name in _NORMS}
    tensors |= {f"{name}_bias": weights.get(f"blocks.0.{name}.bias") for name in _LINEARS}
    tensors |= {f"{name}_weight": parameters.get(f"blocks.0.{name}.weight") for name in _QK_NORMS}
    tensors |= {"norm_weight": parameters["norm.weight"], "norm_bias": parameters.get("norm.bias")}
    tensors |= {
        "token_weight": parameters["tok.weight"],
        "position_weight": parameters.get("pos.weight"),
        "head_weight": head,
    }
    arrays = (logits, norm, keys, values, *tensors.values())
    stride, tile = _layer_stride(c, weights, parameters), _C["TILE"]
    aligned = all(x is None or x.data.ptr % VECTOR_BYTES == 0 for x in arrays) and stride % tile == 0
    assert aligned and len(head) % tile == 0, "decode_step: an array is not aligned"
    device.launch(
        STEP, template, device.sm_count, _C["THREADS"], shared_bytes=shared_bytes,
        logits=logits, norm=norm, tokens=tokens, start=start, length=length, keys=keys, values=values,
        words=words, tag_counter=tag_counter, table=table, **tensors, layer_stride=stride, layers=c.layers,
        count=tokens.shape[1], context=c.context, vocab=len(head), eps=c.norm_eps,
    )  # fmt: skip


def decode_step_rows(device: Device, dtype: np.dtype[Any], config: ModelConfig) -> int:
    """The most rows that decode_step takes of this model: MAX_ROWS, or 0 if it does not take the model.

    A model that fits only with fewer rows is refused: otherwise the kernel, and so the bits, would depend on
    the number of rows. It also refuses:
        - a precision other than bf16, or a width that TILE does not divide;
        - a matmul with more output pairs in one block than the block has threads;
        - QK-norm of other head widths than _QK_NORM_HEAD_DIMS;
        - weights and rows of one block that exceed the shared memory of a multiprocessor.
    """
    divisible = all(width % _C["TILE"] == 0 for width in (config.dim, config.ffn, config.head_dim))
    fits = dtype == BF16 and divisible and _template(config, MAX_ROWS, device.sm_count, device.shared_bytes)
    return MAX_ROWS if fits else 0


def _template(c: ModelConfig, rows: int, blocks: int, shared_bytes: int) -> tuple[Template, int] | None:
    """The kernel's template arguments and bytes of dynamic shared memory; None if the model does not fit."""
    sizes = (blocks, c.dim, c.heads, c.kv_heads, c.head_dim, c.ffn)
    parts = (c.position == "rope", c.qk_norm != "none", c.mlp == "swiglu")
    if c.qk_norm != "none" and c.head_dim not in _QK_NORM_HEAD_DIMS:
        return None
    if any(max_tiles * rows * _C["PAIRS"] > _C["THREADS"] for max_tiles, _, _ in _matmuls(c, blocks)):
        return None
    for regions in _REGIONS:
        size = _shared_bytes(c, rows, regions, blocks)
        if size <= shared_bytes - _STATIC_BYTES:
            return (rows, regions, size, *sizes, *parts), size
    return None


def _matmuls(c: ModelConfig, blocks: int) -> list[tuple[int, int, int]]:
    """Of each matmul of a layer: MAX_TILES_PER_BLOCK, MAX_ITEMS and WEIGHT_BYTES of decode_model.cuh."""
    found = []
    for outputs, inputs in c.linears.values():
        max_tiles, steps = -(-outputs // (_C["TILE"] * blocks)), -(-inputs // _C["STEP"])
        steps_per_item = -(-steps // max(1, min(_C["WARPS"] // max_tiles, steps)))
        splits = -(-steps // steps_per_item)
        found.append((max_tiles, max_tiles * splits, max_tiles * _C["TILE"] * _row_bytes(inputs)))
    return found


def _row_bytes(inputs: int) -> int:
    """Bytes from one row of inputs or weights to the next in shared memory: ROW_STRIDE."""
    return (-(-inputs // _C["ROW_ALIGN"]) * _C["ROW_ALIGN"] + _C["ROW_PAD"]) * BF16.itemsize


def _shared_bytes(c: ModelConfig, rows: int, regions: int, blocks: int) -> int:
    """BYTES of the kernel: weight regions, partial sums, and input rows or attention's buffers.

    The kernel computes the same sum, and does not compile if this one differs.
    """
    matmuls, steps = _matmuls(c, blocks), -(-c.dim // _C["STEP"])
    weights = sum(max(size for _, _, size in matmuls[region::regions]) for region in range(regions))
    group = next(group for group in (4, 2, 1) if steps % group == 0)
    stage = _C["WARPS"] * group * _C["WARP"] * VECTOR_BYTES  # of the head's pipeline
    partial_sums = max(items for _, items, _ in matmuls) * rows * _C["TILE"] * FLOAT.itemsize
    input_rows = rows * _row_bytes(max(c.dim, c.ffn))
    new_qkv, partials = (1 + 2 * rows) * c.head_dim, _C["WARPS"] * (c.head_dim + 2)
    attention = new_qkv * BF16.itemsize + partials * FLOAT.itemsize
    return max(weights, stage) + partial_sums + max(input_rows, attention)


def _words(c: ModelConfig) -> int:
    """Words of the kernel's struct Exchange with MAX_ROWS rows."""
    qkv, act = c.qkv_dim // 2, c.ffn // 2
    splits = c.heads * _C["KV_SPLITS"] * (2 + c.head_dim)
    return 2 + MAX_ROWS * (2 + c.dim + qkv + act + splits)


def _layer_stride(c: ModelConfig, weights: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    """Elements from a tensor of one layer to that of the next: the same for all tensors and layers."""
    distances = {
        (tensors[name.replace(".0.", f".{i}.", 1)].data.ptr - tensors[name].data.ptr)
        / (tensors[name].itemsize * i)
        for tensors, parts in ((weights, _LINEARS), (parameters, (*_NORMS, *_QK_NORMS)))
        for name in (f"blocks.0.{part}.{kind}" for part in parts for kind in ("weight", "bias"))
        if name in tensors
        for i in range(1, c.layers)
    }
    assert len(distances) <= 1, f"decode_step: layers lie at unequal distances, {distances}"
    return int(distances.pop()) if distances else 0


def _examples() -> tuple[Template, ...]:
    """Instances that tests compile: four models, on GPUs with much and with little shared memory."""
    gpt2 = ModelConfig(
        50257, 12, 12, 12, 768, 3072, 1024, norm="layernorm", position="learned", mlp="gelu", bias=True
    )
    euler = ModelConfig(4096, 16, 12, 4, 768, 2048, 512)
    small = ModelConfig(512, 4, 4, 2, 128, 344, 128)
    of_gpt2 = ((gpt2, 1, 132, 227), (gpt2, 4, 132, 227), (gpt2, 1, 128, 99), (gpt2, 4, 128, 99))
    qwen3 = ModelConfig(50257, 12, 6, 6, 768, 2048, 1024, qk_norm="weighted")
    cases = (*of_gpt2, (euler, 1, 132, 227), (small, 3, 28, 99), (qwen3, 1, 132, 227), (qwen3, 4, 132, 227))
    found = [_template(c, rows, blocks, kib * 1024) for c, rows, blocks, kib in cases]
    assert all(found), "decode_step: an example does not fit"
    return tuple(one[0] for one in found if one)


STEP = Kernel(_SOURCE, "decode_step", _examples(), open=True)
