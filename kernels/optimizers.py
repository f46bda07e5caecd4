"""The optimizers: a class each, with its constants, its buffers, and how it is applied.

A new optimizer is a class here and a line in OPTIMIZERS; its update is an operation (kernels/ops.py).
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
from kernels.parameters import CLEARED, DECAYS, MUON, RUN, Parameter, flat_size, parameter_table
from kernels.parts import MLPS

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class AdamW:
    """AdamW for all parameters (kernels/cpu/adamw.py).

    Args:
        beta1, beta2: decay of the means of the gradients and of their squares, 0 to below 1.
        eps: added to the root of the second mean.
        weight_decay: of matrices; norms and biases do not decay.
        grad_clip: the largest L2 norm of the gradient; 0 does not clip.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0

    def buffers(self, config: ModelConfig, dtype: np.dtype[Any], storage: np.dtype[Any]) -> list[Buffer]:
        """What the optimizer holds beside parameters and gradients; kind "moments" is saved with a run's
        state.

        Args:
            config: the model.
            dtype, storage: of parameters, and of compute weights.
        """
        size = flat_size(parameter_table(config))
        moments = [Buffer(name, "moments", (size,), dtype) for name in ("exp_avg", "exp_avg_sq")]
        return [*moments, Buffer("flags", "parameters", (size // RUN,), np.dtype(np.uint8))]

    def flags(self, table: list[Parameter]) -> NDArray[np.uint8]:
        """(flat_size / RUN,) uint8, what the operation adamw does with each run of RUN elements: DECAYS,
        CLEARED, MUON.
        """
        flags = np.zeros(flat_size(table) // RUN, np.uint8)
        for p in table:
            flag = DECAYS * (len(p.shape) > 1) | CLEARED * (not p.linear) | MUON * self.skips(p)
            flags[p.offset // RUN : p.offset // RUN + p.runs] = flag
        return flags

    def skips(self, p: Parameter) -> bool:
        """Whether AdamW leaves the parameter to another rule."""
        return False

    def apply(
        self, ops: Ops, arena: Arena, config: ModelConfig, grad_norm: Array, lr: Array, step: Array
    ) -> None:
        """One update of the parameters in `arena`, and of the compute weights if there are any."""
        ops.adamw(
            arena.whole("parameters"), arena.whole("exp_avg"), arena.whole("exp_avg_sq"),
            arena.whole("gradients"), arena.whole("weights") if "weights" in arena else None,
            arena.whole("flags"), grad_norm, lr, step, beta1=self.beta1, beta2=self.beta2, eps=self.eps,
            weight_decay=self.weight_decay, grad_clip=self.grad_clip,
        )  # fmt: skip

    def describe(self, table: list[Parameter]) -> str:
        """The optimizer in words where it is not the usual one; else nothing."""
        return ""


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon for the blocks' matrices (kernels/cpu/muon.py), AdamW for everything else, at one learning
    rate.
    """

    def buffers(self, config: ModelConfig, dtype: np.dtype[Any], storage: np.dtype[Any]) -> list[Buffer]:
        """AdamW's, and scratch for the largest group of matrices: two copies of it and of its Gram
        matrices.
        """
        shapes = [(layers * count, m, n) for layers, count, m, n in (x.shape for x in block_matrices(config))]
        sizes = {
            "muon_x": max(map(math.prod, shapes)),
            "muon_gram": max(count * min(m, n) ** 2 for count, m, n in shapes),
        }
        scratch = [Buffer(name, "muon", (size,), storage, 2) for name, size in sizes.items()]
        return super().buffers(config, dtype, storage) + scratch

    def skips(self, p: Parameter) -> bool:
        return p.in_block

    def apply(
        self, ops: Ops, arena: Arena, config: ModelConfig, grad_norm: Array, lr: Array, step: Array
    ) -> None:
        super().apply(ops, arena, config, grad_norm, lr, step)
        compute_weights = arena.whole("weights") if "weights" in arena else None
        for matrices in block_matrices(config):
            layers, count, m, n = matrices.shape
            params, exp_avg, grads = (
                matrices.view(arena.whole(name)) for name in ("parameters", "exp_avg", "gradients")
            )
            x, x_next = (arena.view("muon_x", (layers * count, m, n), i) for i in (0, 1))
            gram, poly = (arena.view("muon_gram", (layers * count, min(m, n), min(m, n)), i) for i in (0, 1))
            copy = None if compute_weights is None else matrices.view(compute_weights)
            ops.muon(
                params, exp_avg, grads, copy, x, x_next, gram, poly, grad_norm, lr,
                weight_decay=self.weight_decay, grad_clip=self.grad_clip,
            )  # fmt: skip

    def describe(self, table: list[Parameter]) -> str:
        return f"Muon for {sum(p.size for p in table if p.in_block):,} of "


OPTIMIZERS = {"adamw": AdamW, "muon": Muon}


@dataclass(frozen=True)
class Matrices:
    """Matrices of one shape that Muon updates at once, as views of a flat array.

    Args:
        shape: (layers, count, m, n); the matrices of a layer are adjacent.
        first: offset of the first block's parameters, in elements.
        stride: elements from one block's parameters to the next's.
        begin: offset of the matrices within a block.
    """

    shape: tuple[int, int, int, int]
    first: int
    stride: int
    begin: int

    def view(self, flat: Array) -> Array:
        """The matrices in a flat array."""
        layers, *matrices = self.shape
        blocks = flat[self.first : self.first + layers * self.stride].reshape(layers, self.stride)
        return blocks[:, self.begin : self.begin + math.prod(matrices)].reshape(self.shape)


def block_matrices(config: ModelConfig) -> list[Matrices]:
    """The blocks' weight matrices; queries, keys, values, gate and up are matrices of their own.

    Muon equalizes the singular values of a matrix. Those of a stack belong to no map that the model applies:
    equalizing them would trade the size of the values for that of the queries, say.
    """
    c = config
    splits = {"qkv": (c.dim, c.kv_dim, c.kv_dim), "up": MLPS[c.mlp].muon_splits(c)}
    blocks = [p for p in parameter_table(config) if p.name.startswith("blocks.")]
    first, stride, found = blocks[0].offset, sum(p.runs for p in blocks) * RUN // c.layers, []
    for p in filter(lambda p: p.in_block, blocks[: len(blocks) // c.layers]):
        begin, width = p.offset - first, p.shape[1]
        for rows, alike in groupby(splits.get(p.part, p.shape[:1])):
            count = len(list(alike))
            found.append(Matrices((c.layers, count, rows, width), first, stride, begin))
            begin += count * rows * width
    return found
