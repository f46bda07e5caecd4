"""Buffers of a memory plan, and the one allocation that holds them all."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Every buffer starts at a multiple of this many bytes, for vector loads.
ALIGNMENT_BYTES = 256
# Views are kept: making one takes CuPy some microseconds, which would add to every decoded token.
MAX_VIEWS = 4096
# Kinds of buffers whose size depends on the parameters only, not on the batch.
FIXED = ("parameters", "gradients", "moments", "muon")


@dataclass(frozen=True)
class Buffer:
    """One named array of the plan; `kind` groups it in the report, `layers` is the number of such arrays."""

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
    """Every buffer of a plan in one allocation.

    Args:
        plan: the buffers; names are unique.
        memory: uint8 array of plan_bytes(plan) bytes of the device, zeroed.
    """

    def __init__(self, plan: list[Buffer], memory: Array) -> None:
        assert memory.size == plan_bytes(plan)
        self._flat: dict[tuple[str, int], Array] = {}
        self._buffers = {buffer.name: buffer for buffer in plan}
        assert len(self._buffers) == len(plan)
        offset = 0
        for buffer in plan:
            exact = math.prod(buffer.shape) * buffer.dtype.itemsize
            for layer in range(buffer.layers):
                self._flat[buffer.name, layer] = memory[offset : offset + exact].view(buffer.dtype)
                offset += buffer.layer_bytes
        self._views: dict[tuple[str, tuple[int, ...], int], Array] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._buffers

    def view(self, name: str, shape: tuple[int, ...], layer: int = 0) -> Array:
        """The first prod(shape) elements of a buffer in that shape; layers that share a buffer get the same
        array.
        """
        layer = layer if self._buffers[name].layers > 1 else 0
        found = self._views.get((name, shape, layer))
        if found is None:
            if len(self._views) > MAX_VIEWS:  # prompts have many lengths
                self._views.clear()
            found = self._flat[name, layer][: math.prod(shape)].reshape(shape)
            self._views[name, shape, layer] = found
        return found

    def rows(self, name: str, count: int, layer: int = 0) -> Array:
        """The first `count` rows of a buffer."""
        return self.view(name, (count, *self._buffers[name].shape[1:]), layer)

    def whole(self, name: str, layer: int = 0) -> Array:
        """A buffer in its own shape."""
        return self.view(name, self._buffers[name].shape, layer)


def plan_bytes(plan: list[Buffer]) -> int:
    """Bytes that an arena of this plan takes."""
    return sum(buffer.total_bytes for buffer in plan) + ALIGNMENT_BYTES
