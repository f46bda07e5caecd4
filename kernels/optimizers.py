"""The optimizers: a class each, with its constants, its buffers, and how it is applied.

A new optimizer is a class here and a line in OPTIMIZERS; its update is an operation (kernels/ops.py). Its
constants are AdamW's fields. Runs take all of them from conf/pretrain and conf/sft; the defaults here serve
engines that are made without an optimizer.
"""

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.arena import Arena, Buffer
from kernels.config import ModelConfig
from kernels.ops import Ops
from kernels.parameters import (
    DECAYS,
    GROUP_SHIFT,
    GROUPS,
    MUON,
    SEGMENT,
    ZERO_GRAD,
    Parameter,
    flat_size,
    parameter_table,
)  # fmt: skip
from kernels.parts import MLPS
from kernels.split import Split, balanced_cuts, equal_cuts, one_rank

Array = np.ndarray[Any, Any]

# They balance the ranks' work under Muon: the seconds that AdamW takes for an element (30 bytes at 4 TB/s),
# and a matmul for an operation (400 TFLOP/s). Only their ratio matters.
ADAMW_SECONDS, OPERATION_SECONDS = 30 / 4e12, 1 / 4e14
PIECE = 1024 * SEGMENT  # AdamW updates are cut into pieces of this size


@dataclass(frozen=True)
class AdamW:
    """AdamW for all parameters (kernels/cpu/adamw.py).

    Args:
        beta1, beta2: decay of the means of the gradients and of their squares, 0 to below 1.
        eps: added to the root of the second mean.
        weight_decay: of matrices; norms and biases do not decay.
        embedding_lr_scale, head_lr_scale, vector_lr_scale: learning rate of each group of parameters
            (kernels.parameters.GROUPS), times that of the blocks' matrices.
        grad_clip: the largest L2 norm of the gradient; 0 does not clip.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    embedding_lr_scale: float = 1.0
    head_lr_scale: float = 1.0
    vector_lr_scale: float = 1.0

    def split(
        self, config: ModelConfig, chunk: int, rank: int = 0, ranks: int = 1, *, sharded: bool = True
    ) -> Split:
        """What each rank updates.

        Args:
            config: the model.
            chunk: elements of a chunk of ops.square_sums.
            rank, ranks: this rank, and the number of ranks.
            sharded: whether each rank updates its own part only (ZeRO, stage 1).
        """
        table = parameter_table(config)
        used = flat_size(table)
        if ranks == 1:
            return one_rank(used, chunk)
        cuts = self.cuts(table, ranks, chunk) if sharded else equal_cuts(used, ranks, chunk)
        return Split(rank, used, chunk, cuts, sharded)

    def cuts(self, table: list[Parameter], ranks: int, chunk: int) -> tuple[int, ...]:
        """(ranks + 1,) offsets at which the flat arrays are cut, so that each rank updates one part."""
        return equal_cuts(flat_size(table), ranks, chunk)

    def buffers(
        self, config: ModelConfig, split: Split, dtype: np.dtype[Any], storage: np.dtype[Any]
    ) -> list[Buffer]:
        """What the optimizer holds beside parameters and gradients; kind "moments" is saved with a run's
        state.

        Args:
            config: the model.
            split: what this rank updates.
            dtype, storage: of parameters, and of compute weights.
        """
        size = split.own_size
        moments = [Buffer(name, "moments", (size,), dtype) for name in ("exp_avg", "exp_avg_sq")]
        return [*moments, Buffer("flags", "parameters", (size // SEGMENT,), np.dtype(np.uint8))]

    def flags(self, table: list[Parameter]) -> NDArray[np.uint8]:
        """(flat_size / SEGMENT,) uint8, what the operation adamw does with each segment of the flat
        arrays: DECAYS, ZERO_GRAD, MUON, and the parameter's group.
        """
        flags = np.zeros(flat_size(table) // SEGMENT, np.uint8)
        for p in table:
            flag = DECAYS * (len(p.shape) > 1) | ZERO_GRAD * (not p.linear) | MUON * self.skips(p)
            flag |= GROUPS.index(p.group) << GROUP_SHIFT
            flags[p.offset // SEGMENT : (p.offset + p.padded_size) // SEGMENT] = flag
        return flags

    def own_flags(self, table: list[Parameter], split: Split) -> NDArray[np.uint8]:
        """The flags of this rank's part; 0 in the padding."""
        flags = np.zeros(split.size // SEGMENT, np.uint8)
        flags[: split.used // SEGMENT] = self.flags(table)
        return flags[split.own.start // SEGMENT : split.own.stop // SEGMENT]

    def skips(self, p: Parameter) -> bool:
        """Whether AdamW leaves the parameter to another rule."""
        return False

    def apply(
        self, ops: Ops, arena: Arena, config: ModelConfig, split: Split, grad_norm: Array, lr: Array,
        step: Array,
    ) -> None:  # fmt: skip
        """One update of this rank's part of the parameters in `arena`, and of the compute weights if there
        are any.
        """
        params, grads, compute_weights = own_arrays(arena, split)
        ops.adamw(
            params, arena.whole("exp_avg"), arena.whole("exp_avg_sq"), grads, compute_weights,
            arena.whole("flags"), grad_norm, lr, step, beta1=self.beta1, beta2=self.beta2, eps=self.eps,
            weight_decay=self.weight_decay, grad_clip=self.grad_clip,
            lr_scales=tuple(
                1.0 if group == "matrix" else getattr(self, f"{group}_lr_scale") for group in GROUPS
            ),
        )  # fmt: skip

    def describe(self, table: list[Parameter]) -> str:
        """What Engine.describe writes before the number of parameters; empty for AdamW."""
        return ""


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon for the blocks' matrices (kernels/cpu/muon.py), AdamW for everything else, at one learning
    rate.
    """

    def cuts(self, table: list[Parameter], ranks: int, chunk: int) -> tuple[int, ...]:
        """Between matrices, so that the ranks have about the same work."""
        pieces: list[tuple[int, float]] = []
        for p in table:
            if p.is_block_matrix:
                pieces.append((p.padded_size, _muon_seconds(*p.shape)))
            else:
                for start in range(0, p.padded_size, PIECE):
                    elements = min(PIECE, p.padded_size - start)
                    pieces.append((elements, elements * ADAMW_SECONDS))
        pieces.append((flat_size(table) - sum(elements for elements, _ in pieces), 0.0))
        return balanced_cuts(pieces, ranks)

    def buffers(
        self, config: ModelConfig, split: Split, dtype: np.dtype[Any], storage: np.dtype[Any]
    ) -> list[Buffer]:
        """AdamW's, and scratch for the largest group of matrices: two copies of it and of its Gram
        matrices.
        """
        groups = owned_matrices(config, split.own)
        shapes = [(layers * count, m, n) for layers, count, m, n in (group.shape for group in groups)]
        sizes = {
            "muon_x": max(map(math.prod, shapes), default=0),
            "muon_gram": max((count * min(m, n) ** 2 for count, m, n in shapes), default=0),
        }
        scratch = [Buffer(name, "muon", (size,), storage, 2) for name, size in sizes.items()]
        return super().buffers(config, split, dtype, storage) + scratch

    def skips(self, p: Parameter) -> bool:
        return p.is_block_matrix

    def apply(
        self, ops: Ops, arena: Arena, config: ModelConfig, split: Split, grad_norm: Array, lr: Array,
        step: Array,
    ) -> None:  # fmt: skip
        super().apply(ops, arena, config, split, grad_norm, lr, step)
        own_params, own_grads, own_weights = own_arrays(arena, split)
        for matrices in owned_matrices(config, split.own):
            layers, count, m, n = matrices.shape
            params, exp_avg, grads = (
                matrices.view(ops, flat) for flat in (own_params, arena.whole("exp_avg"), own_grads)
            )
            x, x_next = (arena.view("muon_x", (layers * count, m, n), i) for i in (0, 1))
            gram, poly = (arena.view("muon_gram", (layers * count, min(m, n), min(m, n)), i) for i in (0, 1))
            compute_weights = None if own_weights is None else matrices.view(ops, own_weights)
            ops.muon(
                params, exp_avg, grads, compute_weights, x, x_next, gram, poly, grad_norm, lr,
                weight_decay=self.weight_decay, grad_clip=self.grad_clip,
            )  # fmt: skip

    def describe(self, table: list[Parameter]) -> str:
        return f"Muon for {sum(p.size for p in table if p.is_block_matrix):,} of "


OPTIMIZERS: dict[str, type[AdamW]] = {
    "adamw": AdamW,
    "muon": Muon,
}


def own_arrays(arena: Arena, split: Split) -> tuple[Array, Array, Array | None]:
    """This rank's part of parameters, gradients and compute weights (None if matmuls read parameters)."""
    params = arena.whole("parameters")
    return (
        params if params.size == split.own_size else params[split.own],
        arena.whole("gradients")[split.own],
        arena.whole("weights")[split.own] if "weights" in arena else None,
    )


@dataclass(frozen=True)
class Matrices:
    """Matrices of one shape that Muon updates at once, as views of a flat array.

    Args:
        shape: (layers, count, m, n); the matrices of a layer are adjacent.
        offset: of the first matrix, in elements.
        stride: elements from one layer's matrices to the next's.
    """

    shape: tuple[int, int, int, int]
    offset: int
    stride: int

    def view(self, ops: Ops, flat: Array) -> Array:
        """The matrices in a flat array."""
        return ops.layers_view(flat, self.offset, self.shape, self.stride)

    def within(self, own: slice) -> "Matrices | None":
        """Those that lie in a part of the flat array, with offsets in that part. A layer's matrices belong to
        one parameter, and no part ends within one.
        """
        layers, *matrices = self.shape
        size = math.prod(matrices)
        offsets = (self.offset + layer * self.stride for layer in range(layers))
        inside = [begin for begin in offsets if own.start <= begin and begin + size <= own.stop]
        if not inside:
            return None
        count, m, n = matrices
        return Matrices((len(inside), count, m, n), inside[0] - own.start, self.stride)


def owned_matrices(config: ModelConfig, own: slice) -> list[Matrices]:
    """The block_matrices of one rank, with offsets in its part."""
    return [owned for group in block_matrices(config) if (owned := group.within(own))]


def block_matrices(config: ModelConfig) -> list[Matrices]:
    """The blocks' weight matrices; queries, keys, values, gate and up are matrices of their own.

    Muon equalizes the singular values of a matrix. A stack such as [Wq; Wk; Wv] is not one linear map of the
    model: orthogonalized together, a larger Wq would shrink Wv.
    """
    c = config
    splits = {"qkv": (c.dim, c.kv_dim, c.kv_dim), "up": MLPS[c.mlp].muon_splits(c)}
    blocks = [p for p in parameter_table(config) if p.name.startswith("blocks.")]
    first, stride, found = blocks[0].offset, sum(p.padded_size for p in blocks) // c.layers, []
    for p in filter(lambda p: p.is_block_matrix, blocks[: len(blocks) // c.layers]):
        begin, width = p.offset - first, p.shape[1]
        for rows, alike in groupby(splits.get(p.part, p.shape[:1])):
            count = len(list(alike))
            found.append(Matrices((c.layers, count, rows, width), first + begin, stride))
            begin += count * rows * width
    return found


def _muon_seconds(m: int, n: int) -> float:
    """The time of one update of a matrix (kernels/cuda/muon.py: cost)."""
    from kernels.cpu.muon import ITERATIONS  # here: importing Numba takes half a second

    k = min(m, n)
    return ITERATIONS * (4 * m * n + 2 * k * k) * k * OPERATION_SECONDS + m * n * ADAMW_SECONDS
