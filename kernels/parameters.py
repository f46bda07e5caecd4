"""The parameter table: every tensor's name, shape, offset in the flat arrays, and initial values."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.config import ModelConfig
from kernels.parts import NORMS, POSITIONS, QK_NORMS

Array = np.ndarray[Any, Any]

# The flat arrays consist of segments of SEGMENT elements. A parameter starts at a segment, so that no vector
# load straddles two parameters. The number of segments is a multiple of RANKS, so that up to RANKS processes
# can share an update.
SEGMENT = 64
RANKS = 8
# Bits of a segment's flag, for the operation adamw: weight decay applies; the gradient is set to zero for the
# next update; the segment is Muon's, and AdamW leaves it alone. The bits from GROUP_SHIFT on are the index of
# the parameter's group, each of which has a learning rate of its own.
DECAYS, ZERO_GRAD, MUON, GROUP_SHIFT = 1, 2, 4, 3
GROUPS = ("matrix", "embedding", "head", "vector")
# Standard deviation of GPT-2's initial weights at its width of 768; other widths keep the variance of a
# matmul's result.
INIT_STD, INIT_DIM = 0.02, 768


@dataclass(frozen=True)
class Parameter:
    """One tensor.

    Args:
        name: "blocks.3.qkv.weight".
        shape: of the tensor.
        offset: of its first element in the flat arrays.
        std: standard deviation of its normal initial values; None: ones.
        linear: whether it is the weight of a matmul, whose gradient the first micro-batch of an update
            overwrites.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    std: float | None
    linear: bool

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def is_block_matrix(self) -> bool:
        """Whether it is the weight of a block's linear layer."""
        return self.linear and self.name.startswith("blocks.")

    @property
    def group(self) -> str:
        """Which of GROUPS it belongs to. A tied head is an embedding; norms and biases are vectors."""
        if self.is_block_matrix:
            return "matrix"
        return {"tok.weight": "embedding", "pos.weight": "embedding", "head.weight": "head"}.get(
            self.name, "vector"
        )

    @property
    def layer(self) -> int:
        """The block that it belongs to, from 0."""
        return int(self.name.split(".")[1])

    @property
    def part(self) -> str:
        """The name of a block's linear layer or norm, "qkv" of "blocks.3.qkv.weight"."""
        return self.name.split(".")[2]

    @property
    def padded_size(self) -> int:
        """Elements of the flat arrays that the tensor occupies: whole segments."""
        return -(-self.size // SEGMENT) * SEGMENT


def parameter_table(config: ModelConfig) -> list[Parameter]:
    """All parameters, in the order in which the backward pass finishes their gradients.

    Linear weights are (outputs, inputs). `qkv` stacks the query, key and value heads; `up` of a SwiGLU stacks
    gate and up; `head` stacks the prediction heads that are not the token embedding itself.
    """
    c, table, offset = config, [], 0
    std = INIT_STD * math.sqrt(INIT_DIM / c.dim)

    def add(name: str, *shape: int, std: float | None, linear: bool = False) -> None:
        nonlocal offset
        table.append(Parameter(name, shape, offset, std, linear))
        offset += table[-1].padded_size

    def add_norm(name: str) -> None:
        for kind, kind_std in NORMS[c.norm].parameter_std.items():
            add(f"{name}.{kind}", c.dim, std=kind_std)

    def add_linear(block: str, name: str, std: float) -> None:
        add(f"{block}{name}.weight", *c.linears[name], std=std, linear=True)
        if c.bias:
            add(f"{block}{name}.bias", c.linears[name][0], std=0.0)

    untied_heads = c.mtp_heads - c.tied_head
    if untied_heads:
        add("head.weight", untied_heads, c.padded_vocab, c.dim, std=std, linear=True)
    add_norm("norm")
    # The 2 L branches that are added to the stream start smaller, so that its variance does not grow with the
    # depth.
    branch_std = std / math.sqrt(2 * c.layers)
    for i in reversed(range(c.layers)):
        block = f"blocks.{i}."
        add_linear(block, "down", branch_std)
        add_linear(block, "up", std)
        add_norm(f"{block}norm2")
        add_linear(block, "proj", branch_std)
        for name in QK_NORMS[c.qk_norm].parameters:
            add(f"{block}{name}.weight", c.head_dim, std=None)
        add_linear(block, "qkv", std)
        add_norm(f"{block}norm1")
    if POSITIONS[c.position].embedding:
        add("pos.weight", c.context, c.dim, std=std)
    add("tok.weight", c.padded_vocab, c.dim, std=std, linear=c.tied_head)
    return table


def flat_size(table: list[Parameter]) -> int:
    """Elements of a flat array: every parameter in whole segments, their number a multiple of RANKS."""
    end = table[-1].offset + table[-1].padded_size
    return -(-end // (SEGMENT * RANKS)) * SEGMENT * RANKS


def stream_parameters(table: list[Parameter]) -> list[Parameter]:
    """The parameters that the residual stream reads in fp32 (embeddings, norms, biases), with offsets in a
    flat array of their own.
    """
    found: list[Parameter] = []
    for p in table:
        if not p.is_block_matrix and p.name != "head.weight":
            offset = found[-1].offset + found[-1].padded_size if found else 0
            found.append(replace(p, offset=offset))
    return found


def named(flat: Array, table: list[Parameter]) -> dict[str, Array]:
    """Views of a flat array by parameter name."""
    return {p.name: flat[p.offset : p.offset + p.size].reshape(p.shape) for p in table}


def flattened(weights: Mapping[str, Array], table: list[Parameter], dtype: np.dtype[Any]) -> Array:
    """A flat array of these weights.

    Raises:
        ValueError: a name is missing or unknown, or a shape differs.
    """
    expected = {p.name: p.shape for p in table}
    for name in expected.keys() ^ weights.keys():
        raise ValueError(f"weights: {name} is {'unknown to this model' if name in weights else 'missing'}")
    flat = np.zeros(flat_size(table), dtype)
    for name, target in named(flat, table).items():
        if weights[name].shape != expected[name]:
            raise ValueError(f"weights: {name} expected shape {expected[name]}, got {weights[name].shape}")
        target[...] = weights[name]
    return flat


def initial_weights(config: ModelConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """Normal weights, ones for norms and zeros for biases; the same on every device. Padding rows of the
    vocabulary are zero.
    """

    def initial(index: int, p: Parameter) -> NDArray[np.float32]:
        if p.std is None:
            return np.ones(p.shape, np.float32)
        if p.std == 0:
            return np.zeros(p.shape, np.float32)
        # Each tensor has its own random stream, so another vocabulary or depth does not change the others.
        weight = np.random.Generator(np.random.PCG64([seed, index])).standard_normal(p.shape, np.float32)
        weight *= np.float32(p.std)
        if p.name in ("tok.weight", "head.weight"):
            weight[..., config.vocab_size :, :] = 0
        return weight

    table = parameter_table(config)
    with ThreadPoolExecutor() as pool:  # NumPy draws without holding Python's lock
        weights = pool.map(initial, range(len(table)), table)
        return {p.name: weight for p, weight in zip(table, weights, strict=True)}
