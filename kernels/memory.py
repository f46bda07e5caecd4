"""The memory plan: every byte that an engine holds.

All buffers are known before the first step. Nothing is allocated while training, and a plan that is too large
is refused at once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.arena import Buffer
from kernels.config import ModelConfig, Numerics
from kernels.fp8 import fp8_plan
from kernels.ops import Ops
from kernels.optimizers import AdamW
from kernels.parameters import Parameter, flat_size, parameter_table, stream_parameters
from kernels.parts import MLPS, NORMS, QK_NORMS
from kernels.split import Split, one_rank

# At most this many bytes of logits are held at once; a head goes over its positions in as many parts as that
# takes.
LOGITS_BYTES = 2**30
RANK_COUNTS = (2, 4, 8, 16, 32, 64)  # numbers of GPUs that are tried for a model that does not fit on one


def activation_plan(
    config: ModelConfig,
    numerics: Numerics,
    rows: int,
    *,
    training: bool,
    dtype: np.dtype[Any],
    storage: np.dtype[Any] | None = None,
) -> list[Buffer]:
    """Activations of a forward pass over rows = B * T positions and, in training, activation gradients.

    In training each layer keeps what its backward pass reads; otherwise all layers share one buffer.
    Activations and their gradients have the storage type. The residual stream, statistics and losses have
    dtype: the storage type's rounding could hide what distinguishes the stream of one position from that of
    another.
    """
    storage, c = storage or dtype, config
    layers, mlp = c.layers if training else 1, MLPS[c.mlp]
    inp_layers = 1 if numerics.precision == "fp8" else layers  # fp8 saves the inputs of matmuls as casts
    act_layers = 1 if numerics.recompute == "mlp" else inp_layers
    widths = (
        ("residual1", c.dim, layers),
        ("norm1", c.dim, inp_layers),
        ("qkv", c.qkv_dim, layers),
        ("attended", c.dim, layers),
        ("residual2", c.dim, layers),
        ("norm2", c.dim, inp_layers),
        *(
            (name, width, act_layers if name == "act" else layers)
            for name, width in mlp.activations(c).items()
        ),
        ("residual", c.dim, 1),
        ("norm", c.dim, 1),
        ("branch", c.dim, 1),
    )
    plan = [
        Buffer(name, "activations", (rows, width), dtype if name.startswith("residual") else storage, count)
        for name, width, count in widths
    ]
    plan.append(Buffer("lse", "activations", (rows, c.heads), dtype, layers))
    for statistic in NORMS[c.norm].statistics:
        for name, count in (("norm1", layers), ("norm2", layers), ("norm", 1)):
            plan.append(Buffer(f"{name}_{statistic}", "activations", (rows,), dtype, count))
    if QK_NORMS[c.qk_norm].has_rstd:
        plan.append(Buffer("qk_rstd", "activations", (rows, c.heads + c.kv_heads), dtype, layers))
    plan.append(Buffer("logits", "logits", (logits_rows(c, rows, storage), c.padded_vocab), storage))
    plan.append(Buffer("nll", "logits", (rows,), dtype))
    if training:
        gradients = {"dresidual": c.dim, "dnorm": c.dim, "dqkv": c.qkv_dim, "dattended": c.dim}
        for name, width in (gradients | mlp.gradients(c)).items():
            plan.append(Buffer(name, "activation gradients", (rows, width), storage))
    return plan


def logits_rows(config: ModelConfig, rows: int, storage: np.dtype[Any]) -> int:
    """Positions whose logits are held at once: equal parts of `rows`, and at least one position of each
    sequence.
    """
    parts = -(-rows * config.padded_vocab * storage.itemsize // LOGITS_BYTES)
    return max(-(-rows // parts), rows // config.context)


def parameter_plan(
    table: list[Parameter],
    split: Split,
    *,
    training: bool,
    dtype: np.dtype[Any],
    storage: np.dtype[Any] | None = None,
) -> list[Buffer]:
    """The flat arrays of the parameters, with their gradients in training.

    If the storage type is not dtype, matmuls read a copy in the storage type, `weights`, and `parameters`
    holds only what the rank owns. A rank that does not own everything then also holds `stream_weights`: a
    copy in dtype of all parameters that the residual stream reads, its own included.
    """
    has_copy = storage is not None and storage != dtype
    owns_all = split.own_size == split.size
    plan = [Buffer("parameters", "parameters", (split.own_size if has_copy else split.size,), dtype)]
    if training:
        plan.append(Buffer("gradients", "gradients", (split.size,), dtype))
        plan.append(Buffer("square_sums", "gradients", (split.chunks,), dtype))
    if has_copy:
        plan.append(Buffer("weights", "parameters", (split.size,), storage or dtype))
        if not owns_all:
            size = flat_size(stream_parameters(table))
            plan.append(Buffer("stream_weights", "parameters", (size,), dtype))
    return plan


def input_plan(config: ModelConfig, rows: int, *, training: bool, dtype: np.dtype[Any]) -> list[Buffer]:
    """What comes with each batch, and the numbers that vary from step to step or go back to the host."""
    heads, integer = config.mtp_heads, np.dtype(np.int32)
    plan = [
        Buffer("tokens", "inputs", (rows,), integer),
        Buffer("start", "inputs", (rows,), integer),
        Buffer("targets", "inputs", (heads, rows), integer),
        Buffer("correct", "inputs", (rows,), np.dtype(np.bool_)),
        Buffer("staged_inputs", "inputs", (1 + 2 * rows,), integer),
    ]
    if training:
        plan += [
            Buffer("loss_weight", "inputs", (heads, rows), np.dtype(np.float32)),
            Buffer("dnll", "inputs", (heads, rows), dtype),
            Buffer("nll_sums", "inputs", (heads,), np.dtype(np.float64)),
            Buffer("grad_norm", "inputs", (), np.dtype(np.float64)),
            Buffer("lr", "inputs", (), np.dtype(np.float64)),
            Buffer("step", "inputs", (), np.dtype(np.int64)),
        ]
    return plan


def memory_plan(
    config: ModelConfig,
    numerics: Numerics,
    micro_batch: int,
    *,
    training: bool = True,
    dtype: np.dtype[Any] = np.dtype(np.float32),  # noqa: B008 (immutable)
    storage: np.dtype[Any] | None = None,
    workspace_bytes: int = 0,
    optimizer: AdamW | None = None,
    split: Split | None = None,
) -> list[Buffer]:
    """Everything an engine of this configuration holds; computed without allocating any of it.

    Args:
        config, numerics, micro_batch, training: as the engine's.
        dtype: of parameters, gradients, moments, statistics and losses.
        storage: of activations and compute weights; None: dtype.
        workspace_bytes: what the device's operations need while they run.
        optimizer: as the engine's; None: AdamW.
        split: this rank's part of an update; None: one rank.
    """
    rows, table = micro_batch * config.context, parameter_table(config)
    split = split or one_rank(flat_size(table))
    plan = parameter_plan(table, split, training=training, dtype=dtype, storage=storage)
    if training:
        plan += (optimizer or AdamW()).buffers(config, split, dtype, storage or dtype)
    if training and numerics.precision == "fp8":
        plan += fp8_plan(config, table, rows)
    plan += input_plan(config, rows, training=training, dtype=dtype)
    plan += activation_plan(config, numerics, rows, training=training, dtype=dtype, storage=storage)
    if workspace_bytes:
        plan.append(Buffer("workspace", "workspace", (workspace_bytes,), np.dtype(np.uint8)))
    return plan


def plan_of_rank(
    config: ModelConfig,
    numerics: Numerics,
    micro_batch: int,
    ops: Ops,
    optimizer: AdamW | None,
    *,
    rank: int = 0,
    ranks: int = 1,
    sharded: bool = True,
) -> tuple[Split, list[Buffer]]:
    """What rank `rank` of `ranks` updates, and the memory plan of its engine. Without an optimizer the engine
    does not train, and every rank holds the whole model.
    """
    if optimizer:
        split = optimizer.split(config, ops.norm_chunk, rank, ranks, sharded=sharded)
    else:
        split = one_rank(flat_size(parameter_table(config)), ops.norm_chunk)
    return split, memory_plan(
        config, numerics, micro_batch, training=optimizer is not None, dtype=ops.dtype, storage=ops.storage,
        workspace_bytes=ops.workspace_bytes(config, micro_batch * config.context), optimizer=optimizer,
        split=split,
    )  # fmt: skip


def check_fits(
    plan: list[Buffer],
    micro_batch: int,
    available: int,
    on_ranks: Callable[[int], list[Buffer]] | None = None,
) -> None:
    """Refuse a plan that is larger than the device's memory.

    Args:
        plan: the plan.
        micro_batch: sequences in a batch.
        available: bytes of the device.
        on_ranks: number of ranks -> the plan of one of them; None: more ranks are not tried.

    Raises:
        ValueError: the plan is larger; the message says how much is needed, which micro-batch would fit, and
            whether more GPUs would do.
    """
    needed = total_bytes(plan)
    if needed <= available:
        return
    fixed = sum(buffer.total_bytes for buffer in plan if buffer.fixed)
    fitting = int((available - fixed) / ((needed - fixed) / micro_batch))
    cure = (
        f"micro_batch={fitting} fits"
        if fitting > 0
        else "no micro_batch fits: a smaller model or model.context does"
    )
    enough = (ranks for ranks in RANK_COUNTS if on_ranks and total_bytes(on_ranks(ranks)) <= available)
    if (ranks := next(enough, None)) is not None:
        cure += f"; on {ranks} GPUs this micro_batch fits"
    raise ValueError(
        f"memory: micro_batch={micro_batch} needs {needed / 2**30:.1f} GiB, {fixed / 2**30:.1f} of them for "
        f"parameters, and the device has {available / 2**30:.1f}; {cure}"
    )


def total_bytes(plan: list[Buffer]) -> int:
    """Bytes of all buffers."""
    return sum(buffer.total_bytes for buffer in plan)


def report(plan: list[Buffer]) -> str:
    """The plan as lines: bytes by kind, and their sum."""
    kinds: dict[str, int] = {}
    for buffer in plan:
        kinds[buffer.kind] = kinds.get(buffer.kind, 0) + buffer.total_bytes
    kinds["total"] = sum(kinds.values())
    return "\n".join(f"  {kind:<22}{size / 2**20:>12,.1f} MiB" for kind, size in kinds.items())
