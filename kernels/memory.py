"""The plan of every byte an engine holds.

All buffers are known before the first step: nothing is allocated while training, and what doesn't fit is refused at once.
"""

import math
from typing import Any

import numpy as np

from kernels.arena import Buffer
from kernels.config import ModelConfig, Numerics, Optimizer
from kernels.fp8 import fp8_plan
from kernels.parameters import RUN, flat_size, hidden_matrices, parameter_table

# Logits are held for no more rows at once than this allows; a head goes over its rows in as many parts as it takes.
LOGITS_BYTES = 2**30


def activation_plan(
    config: ModelConfig,
    numerics: Numerics,
    rows: int,
    *,
    training: bool,
    dtype: np.dtype[Any],
    storage: np.dtype[Any] | None = None,
) -> list[Buffer]:
    """The activations of a forward pass over `rows` = B * T positions and, in training, the gradients of the way back.

    In training each layer keeps what its backward pass reads; otherwise all layers share one set. Activations and their
    gradients are of the storage type, dtype itself where it is not given. The stream, statistics and losses are of dtype: what
    tells one position's stream from another's may be less than the storage type's rounding of what all have in common.
    """
    storage = storage or dtype
    c, layers = config, config.layers if training else 1
    hidden = c.ffn * (2 if c.mlp == "swiglu" else 1)
    qkv = (c.heads + 2 * c.kv_heads) * c.head_dim
    statistics = ["rstd"] if c.norm == "rmsnorm" else ["mean", "rstd"]
    kept = 1 if numerics.precision == "fp8" else layers  # whose products keep their inputs' casts
    act_layers = 1 if numerics.recompute == "mlp" else kept
    plan = [
        Buffer(name, "activations", (rows, width), dtype if name.startswith("residual") else storage, count)
        for name, width, count in (
            ("residual1", c.dim, layers),
            ("norm1", c.dim, kept),
            ("qkv", qkv, layers),
            ("attended", c.dim, layers),
            ("residual2", c.dim, layers),
            ("norm2", c.dim, kept),
            ("up", hidden, layers),
            ("act", c.ffn, act_layers),
            ("residual", c.dim, 1),
            ("norm", c.dim, 1),
            ("branch", c.dim, 1),
        )
    ]
    plan.append(Buffer("lse", "activations", (rows, c.heads), dtype, layers))
    for statistic in statistics:
        for name, count in (("norm1", layers), ("norm2", layers), ("norm", 1)):
            plan.append(Buffer(f"{name}_{statistic}", "activations", (rows,), dtype, count))
    plan.append(Buffer("logits", "logits", (logits_rows(c, rows, storage), c.padded_vocab), storage))
    plan.append(Buffer("nll", "logits", (rows,), dtype))
    if training:
        plan += [
            Buffer(name, "activation gradients", (rows, width), storage)
            for name, width in (
                ("dresidual", c.dim),
                ("dnorm", c.dim),
                ("dqkv", qkv),
                ("dattended", c.dim),
                ("dup", hidden),
                *((("dact", c.ffn),) if c.mlp == "swiglu" else ()),
            )
        ]
    return plan


def logits_rows(config: ModelConfig, rows: int, storage: np.dtype[Any]) -> int:
    """Of `rows` positions, those whose logits are held at once: equal parts, and at least one position of each sequence."""
    parts = -(-rows * config.padded_vocab * storage.itemsize // LOGITS_BYTES)
    return max(-(-rows // parts), rows // config.context)


def parameter_plan(
    size: int, *, training: bool, dtype: np.dtype[Any], storage: np.dtype[Any] | None = None
) -> list[Buffer]:
    """The flat arrays of `size` parameters: with their gradients and AdamW's two moments in training.

    Where the storage type is another than dtype, a copy in it, `weights`, is what products read.
    """
    names = ("parameters", "gradients", "exp_avg", "exp_avg_sq") if training else ("parameters",)
    plan = [Buffer(name, "moments" if name.startswith("exp") else name, (size,), dtype) for name in names]
    if training:
        plan.append(Buffer("flags", "parameters", (size // RUN,), np.dtype(np.uint8)))
    if storage is not None and storage != dtype:
        plan.append(Buffer("weights", "parameters", (size,), storage))
    return plan


def muon_plan(config: ModelConfig, storage: np.dtype[Any]) -> list[Buffer]:
    """What Muon makes an update in: twice the most matrices that it takes at once, and twice their products with themselves."""
    shapes = [
        (layers * count, m, n)
        for layers, count, m, n in (matrices.shape for matrices in hidden_matrices(config))
    ]
    sizes = {
        "muon_x": max(map(math.prod, shapes)),
        "muon_gram": max(count * min(m, n) ** 2 for count, m, n in shapes),
    }
    return [Buffer(name, "muon", (size,), storage, 2) for name, size in sizes.items()]


def input_plan(config: ModelConfig, rows: int, *, training: bool, dtype: np.dtype[Any]) -> list[Buffer]:
    """What comes in with each batch, and the numbers that vary from step to step or go back to the host."""
    heads, integer = config.mtp_heads, np.dtype(np.int32)
    plan = [
        Buffer("tokens", "inputs", (rows,), integer),
        Buffer("start", "inputs", (rows,), integer),
        Buffer("targets", "inputs", (heads, rows), integer),
        Buffer("correct", "inputs", (rows,), np.dtype(np.bool_)),
        Buffer("taken", "inputs", (1 + 2 * rows,), integer),
    ]
    if training:
        plan += [
            Buffer("loss_weight", "inputs", (heads, rows), np.dtype(np.float32)),
            Buffer("nll_weight", "inputs", (heads, rows), dtype),
            Buffer("nll_sums", "inputs", (heads,), np.dtype(np.float64)),
            Buffer("grad_norm", "inputs", (), np.dtype(np.float64)),
            Buffer("lr", "inputs", (), np.dtype(np.float64)),
            Buffer("step", "inputs", (), np.dtype(np.int64)),
        ]
    return plan


def exchange_plan(config: ModelConfig, rows: int) -> list[Buffer]:
    """What a cache for `rows` tokens exchanges with the host, see Exchange; what every pass has of its own in two slots.

    Passes take them in turns, so that the host fills one while a pass may still read the other.
    """
    integer = np.dtype(np.int32)
    return [
        Buffer("appended", "exchange", (1 + 2 * rows,), integer, 2),
        Buffer("uniform", "exchange", (rows,), np.dtype(np.float64), 2),
        Buffer("banned", "exchange", (config.vocab_size,), integer),
    ]


def memory_plan(
    config: ModelConfig,
    numerics: Numerics,
    micro_batch: int,
    *,
    training: bool = True,
    dtype: np.dtype[Any] = np.dtype(np.float32),  # noqa: B008 (immutable)
    storage: np.dtype[Any] | None = None,
    workspace_bytes: int = 0,
    optimizer: Optimizer = "adamw",
) -> list[Buffer]:
    """Everything an engine of this configuration holds; computed without allocating any of it.

    Args:
        config, numerics, micro_batch, training: as the engine's.
        dtype: of parameters, gradients, moments, statistics and losses.
        storage: of activations and of the weights that products read; dtype where it is not given.
        workspace_bytes: what the device's operations need while they run.
        optimizer: as the engine's.
    """
    rows, table = micro_batch * config.context, parameter_table(config)
    plan = parameter_plan(flat_size(table), training=training, dtype=dtype, storage=storage)
    if training and numerics.precision == "fp8":
        plan += fp8_plan(config, table, rows)
    plan += input_plan(config, rows, training=training, dtype=dtype)
    plan += activation_plan(config, numerics, rows, training=training, dtype=dtype, storage=storage)
    if training and optimizer == "muon":
        plan += muon_plan(config, storage or dtype)
    if workspace_bytes:
        plan.append(Buffer("workspace", "workspace", (workspace_bytes,), np.dtype(np.uint8)))
    return plan


def plan(
    config: ModelConfig,
    numerics: Numerics,
    micro_batch: int,
    ops: Any,
    *,
    training: bool = True,
    optimizer: Optimizer = "adamw",
) -> list[Buffer]:
    """The memory plan of an engine over a device's operations."""
    return memory_plan(
        config, numerics, micro_batch, training=training, dtype=ops.dtype, storage=ops.storage,
        workspace_bytes=ops.workspace_bytes(config, micro_batch * config.context), optimizer=optimizer,
    )  # fmt: skip


def check_fits(plan: list[Buffer], micro_batch: int, available: int) -> None:
    """Refuse a plan that is larger than the device's memory.

    Raises:
        ValueError: it is; the message says how much is needed and which micro-batch would fit.
    """
    needed = sum(buffer.total_bytes for buffer in plan)
    if needed <= available:
        return
    fixed = sum(buffer.total_bytes for buffer in plan if buffer.fixed)
    fitting = int((available - fixed) / ((needed - fixed) / micro_batch))
    cure = (
        f"micro_batch={fitting} fits"
        if fitting > 0
        else "no micro_batch fits: a smaller model or model.context does"
    )
    raise ValueError(
        f"memory: micro_batch={micro_batch} needs {needed / 2**30:.1f} GiB, {fixed / 2**30:.1f} of them for parameters, and "
        f"the device has {available / 2**30:.1f}; {cure}"
    )


def report(plan: list[Buffer]) -> str:
    """The plan as lines: bytes by kind, and their sum."""
    kinds: dict[str, int] = {}
    for buffer in plan:
        kinds[buffer.kind] = kinds.get(buffer.kind, 0) + buffer.total_bytes
    kinds["total"] = sum(kinds.values())
    return "\n".join(f"  {kind:<22}{size / 2**20:>12,.1f} MiB" for kind, size in kinds.items())
