"""The KV cache, and the memory through which a token's few numbers go between host and device."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.arena import Arena, Buffer, plan_bytes
from kernels.config import ModelConfig
from kernels.ops import Graphs, Ops

Array = np.ndarray[Any, Any]


class TokenIO:
    """Buffers that host and device both read and write, so that decoding a token needs no copies.

    A pass over `rows` new tokens reads its inputs from one of two slots and writes the tokens it samples into
    the other, where the next pass reads them. So the host can fill one slot while the device still reads the
    other.

    Args:
        config: the model.
        ops: the device.
        rows: the most tokens of a pass.
    """

    def __init__(self, config: ModelConfig, ops: Ops, rows: int) -> None:
        integer = np.dtype(np.int32)
        plan = [
            Buffer("inputs", "token_io", (1 + 2 * rows,), integer, 2),  # cached length; starts; tokens
            Buffer("uniform", "token_io", (rows,), np.dtype(np.float64), 2),
            Buffer("suppressed", "token_io", (config.vocab_size,), integer),
        ]
        self.host, self.device = (Arena(plan, memory) for memory in ops.allocate_shared(plan_bytes(plan)))


@dataclass
class KVCache:
    """Keys and values of the tokens seen so far.

    Args:
        keys, values: (layers, B, context, KV, D), of which the first `length` positions are filled.
        token_io: where tokens come in and sampled ones go out.
        graphs: the device's recorded passes with this cache; they go when the cache goes.
        length: tokens of each sequence in the cache.
        in_use: whether a generator of Decoder.sample_stream has exclusive use of the cache.
    """

    keys: Array
    values: Array
    token_io: TokenIO
    graphs: Graphs
    length: int = 0
    in_use: bool = False

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        assert 0 <= length <= self.length
        self.length = length


def new_cache(config: ModelConfig, ops: Ops, batch: int) -> KVCache:
    """An empty cache for `batch` sequences of up to config.context tokens."""
    shape = config.layers, batch, config.context, config.kv_heads, config.head_dim
    size = math.prod(shape) * ops.storage.itemsize
    keys, values = (ops.allocate(size).view(ops.storage).reshape(shape) for _ in range(2))
    return KVCache(keys, values, TokenIO(config, ops, batch * config.context), ops.new_graphs())


def tokens_view(arena: Arena, count: int, slot: int) -> Array:
    """Where a pass of this slot reads its `count` tokens, and the pass before it writes its samples."""
    return arena.view("inputs", (1 + 2 * count,), slot)[1 + count :]


def sampled_tokens(cache: KVCache, count: int, slot: int) -> NDArray[np.int32]:
    """The tokens that a pass of this slot sampled, after the host has waited for it."""
    return tokens_view(cache.token_io.host, count, 1 - slot).copy()
