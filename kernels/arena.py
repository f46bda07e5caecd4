"""Buffers of a plan, and the one allocation that holds them all."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Every buffer starts so many bytes apart or a multiple of them, for vector loads.
ALIGNMENT_BYTES = 256
# Views that an arena keeps, since making one takes a device's library some microseconds, which a decoded token waits for.
MOST_VIEWS = 4096
# The kinds of buffers whose size the parameters alone decide.
FIXED = ("parameters", "gradients", "moments", "muon")


@dataclass(frozen=True)
class Buffer:
    """One named array of the plan; `kind` groups it in the report, `layers` makes one a layer."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layers: int = 1

    @property
    def fixed(self) -> bool:
        """Whether its size does not depend on the batch."""
        return self.kind in FIXED

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's array, rounded up to the alignment."""
        exact = math.prod(self.shape) * self.dtype.itemsize
        return -(-exact // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers' arrays."""
        return self.layer_bytes * self.layers


class Arena:
    """One allocation that holds every buffer of a plan.

    Args:
        plan: the buffers; names are unique.
        allocate: gives that many bytes as a zeroed uint8 array of the device.
    """

    def __init__(self, plan: list[Buffer], allocate: Callable[[int], Array]) -> None:
        memory = allocate(sum(buffer.total_bytes for buffer in plan) + ALIGNMENT_BYTES)
        self._flat: dict[tuple[str, int], Array] = {}
        offset = 0
        for buffer in plan:
            assert (buffer.name, 0) not in self._flat
            exact = math.prod(buffer.shape) * buffer.dtype.itemsize
            for layer in range(buffer.layers):
                self._flat[buffer.name, layer] = memory[offset : offset + exact].view(buffer.dtype)
                offset += buffer.layer_bytes
        self._layers = {buffer.name: buffer.layers for buffer in plan}
        self._views: dict[tuple[str, tuple[int, ...], int], Array] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._layers

    def view(self, name: str, shape: tuple[int, ...], layer: int = 0) -> Array:
        """The first prod(shape) elements of a buffer, in that shape; layers that share one set all get the same."""
        layer = layer if self._layers[name] > 1 else 0
        found = self._views.get((name, shape, layer))
        if found is None:
            if len(self._views) > MOST_VIEWS:  # prompts have many lengths
                self._views.clear()
            found = self._flat[name, layer][: math.prod(shape)].reshape(shape)
            self._views[name, shape, layer] = found
        return found


class Exchange:
    """Buffers in memory that host and device both read and write, so that a token's few numbers take no copies of their own.

    The host writes where nothing that is under way may read, and reads what operations wrote that were waited for.

    Args:
        plan: the buffers; names are unique.
        allocate: gives that many zeroed bytes as the host sees them and as the device does.
    """

    def __init__(self, plan: list[Buffer], allocate: Callable[[int], tuple[Array, Array]]) -> None:
        both = allocate(sum(buffer.total_bytes for buffer in plan) + ALIGNMENT_BYTES)
        self.host, self.device = (Arena(plan, partial(_given, memory)) for memory in both)


def _given(memory: Array, size: int) -> Array:
    assert memory.size == size
    return memory
