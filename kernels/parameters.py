"""The parameter table: every tensor's name, shape and place in the flat arrays, and how it begins."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.config import ModelConfig, Optimizer

Array = np.ndarray[Any, Any]

# Each parameter starts at a multiple of this many elements of the flat arrays, and their whole length divides by
# RANKS of them, so that a vector load never straddles two parameters and up to RANKS processes can share the update.
RUN = 64
RANKS = 8
# What an update does with a run, bits of its flag: weight decay applies; its gradient is set to zero for the next update; it is
# Muon's, not AdamW's.
DECAYS, CLEARED, MUON = 1, 2, 4
# Standard deviation of GPT-2's initial weights, at its width of 768; other widths keep the variance of a product.
INIT_STD, INIT_DIM = 0.02, 768


@dataclass(frozen=True)
class Parameter:
    """One tensor: its place in the flat arrays, and how it begins.

    It begins normal with standard deviation std, or all ones where std is None. product: whether it is the weight of a product,
    whose gradient an update's first micro-batch overwrites.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    std: float | None
    product: bool

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def hidden(self) -> bool:
        """Whether it is a matrix within a block: no embedding and no head."""
        return self.product and self.name.startswith("blocks.")

    @property
    def runs(self) -> int:
        """Runs of RUN elements that the tensor takes up."""
        return -(-self.size // RUN)


@dataclass(frozen=True)
class Matrices:
    """Matrices (m, n) that Muon updates at once: `shape` is (layers, count, m, n), those of a layer lie side by side.

    Layers are `stride` elements of a flat array apart; the first of them begins at `first`, its matrices `begin` behind that.
    """

    shape: tuple[int, int, int, int]
    first: int
    stride: int
    begin: int

    def view(self, flat: Array) -> Array:
        """Them in a flat array."""
        layers, *matrices = self.shape
        blocks = flat[self.first : self.first + layers * self.stride].reshape(layers, self.stride)
        return blocks[:, self.begin : self.begin + math.prod(matrices)].reshape(self.shape)


def parameter_table(config: ModelConfig) -> list[Parameter]:
    """All parameters, in the order in which backward finishes their gradients.

    Linear weights are (outputs, inputs). `qkv` stacks the query heads, the key heads and the value heads; `up` of a SwiGLU
    stacks gate and up; `head` stacks the prediction heads that are not the token embedding itself.
    """
    c, table, offset = config, [], 0
    std = INIT_STD * math.sqrt(INIT_DIM / c.dim)

    def add(name: str, *shape: int, std: float | None, product: bool = False) -> None:
        nonlocal offset
        table.append(Parameter(name, shape, offset, std, product))
        offset += table[-1].runs * RUN

    def add_norm(name: str) -> None:
        add(f"{name}.weight", c.dim, std=None)
        if c.norm == "layernorm":
            add(f"{name}.bias", c.dim, std=0.0)

    def add_linear(name: str, outputs: int, inputs: int, std: float) -> None:
        add(f"{name}.weight", outputs, inputs, std=std, product=True)
        if c.bias:
            add(f"{name}.bias", outputs, std=0.0)

    own_heads = c.mtp_heads - c.tied_head
    if own_heads:
        add("head.weight", own_heads, c.padded_vocab, c.dim, std=std, product=True)
    add_norm("norm")
    for i in reversed(range(c.layers)):
        block = f"blocks.{i}."
        # The 2 L branches that are added to the stream begin smaller, so that the stream's variance does not grow with depth.
        add_linear(f"{block}down", c.dim, c.ffn, std / math.sqrt(2 * c.layers))
        add_linear(f"{block}up", c.ffn * (2 if c.mlp == "swiglu" else 1), c.dim, std)
        add_norm(f"{block}norm2")
        add_linear(f"{block}proj", c.dim, c.dim, std / math.sqrt(2 * c.layers))
        add_linear(f"{block}qkv", (c.heads + 2 * c.kv_heads) * c.head_dim, c.dim, std)
        add_norm(f"{block}norm1")
    if c.position == "learned":
        add("pos.weight", c.context, c.dim, std=std)
    add("tok.weight", c.padded_vocab, c.dim, std=std, product=c.tied_head)
    return table


def flat_size(table: list[Parameter]) -> int:
    """Elements of a flat array over the table: every parameter in whole runs, the end padded to RANKS runs."""
    end = table[-1].offset + table[-1].runs * RUN
    return -(-end // (RUN * RANKS)) * RUN * RANKS


def run_flags(table: list[Parameter], optimizer: Optimizer) -> NDArray[np.uint8]:
    """(flat_size / RUN,): of each run, DECAYS where it is a matrix's, CLEARED where its gradient is not a product's, MUON."""
    flags = np.zeros(flat_size(table) // RUN, np.uint8)
    for p in table:
        flag = (
            DECAYS * (len(p.shape) > 1)
            | CLEARED * (not p.product)
            | MUON * (optimizer == "muon" and p.hidden)
        )
        flags[p.offset // RUN : p.offset // RUN + p.runs] = flag
    return flags


def hidden_matrices(config: ModelConfig) -> list[Matrices]:
    """What Muon updates: the hidden parameters, where queries, keys, values, gate and up are matrices of their own.

    The singular values of a stack are those of no map that the model applies: what makes them equal would trade the size of, say,
    the values for that of the queries.
    """
    c = config
    kv = c.kv_heads * c.head_dim
    stacks = {"qkv": (c.dim, kv, kv), "up": (c.ffn, c.ffn) if c.mlp == "swiglu" else (c.ffn,)}
    blocks = [p for p in parameter_table(config) if p.name.startswith("blocks.")]
    first, stride, found = blocks[0].offset, sum(p.runs for p in blocks) * RUN // c.layers, []
    for p in filter(lambda p: p.hidden, blocks[: len(blocks) // c.layers]):
        begin, width = p.offset - first, p.shape[1]
        for rows, alike in groupby(stacks.get(p.name.split(".")[2], p.shape[:1])):
            count = len(list(alike))
            found.append(Matrices((c.layers, count, rows, width), first, stride, begin))
            begin += count * rows * width
    return found


def named(flat: Array, table: list[Parameter]) -> dict[str, Array]:
    """Views of a flat array by parameter name."""
    return {p.name: flat[p.offset : p.offset + p.size].reshape(p.shape) for p in table}


def initial_weights(config: ModelConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """Normal weights, ones for norms and zeros for biases; the same on every device. Padding rows of the vocabulary are zero."""

    def initial(index: int, p: Parameter) -> NDArray[np.float32]:
        if p.std is None:
            return np.ones(p.shape, np.float32)
        if p.std == 0:
            return np.zeros(p.shape, np.float32)
        # A stream of its own for each tensor: another vocabulary or depth leaves the others as they were.
        weight = np.random.Generator(np.random.PCG64([seed, index])).standard_normal(p.shape, np.float32)
        weight *= np.float32(p.std)
        if p.name in ("tok.weight", "head.weight"):
            weight[..., config.vocab_size :, :] = 0
        return weight

    table = parameter_table(config)
    with ThreadPoolExecutor() as pool:  # NumPy draws without holding Python's lock
        weights = pool.map(initial, range(len(table)), table)
        return {p.name: weight for p, weight in zip(table, weights, strict=True)}
