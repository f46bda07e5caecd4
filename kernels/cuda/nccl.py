"""The collectives of kernels/ranks.py for arrays of the GPU, by NVIDIA's NCCL.

They run on the device's stream, in order with the kernels, and may be captured in a CUDA graph; `reduce` runs
on a stream of its own. NCCL has no collective for parts of different lengths. A group of reductions or
broadcasts, one for each root, takes its place.

Determinism: NCCL chooses the order of a sum by topology and size. The same GPUs give the same bits. Two ranks
have one order only.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import cupy
import numpy as np

from kernels.cuda.runtime.launch import BF16
from kernels.ops import Ops
from kernels.ranks import Link, Ranks

Array = Any


class NcclRanks(Ranks):
    """The collectives on GPUs.

    Raises:
        ValueError: NCCL is missing, or does not connect the GPUs.
    """

    def __init__(self, link: Link, ops: Ops) -> None:
        super().__init__(link)
        try:
            from cupy.cuda import nccl

            available = nccl.available
        except ImportError as error:
            raise _missing(error) from None
        if not available:
            raise _missing("CuPy finds no libnccl")
        self._nccl, self._stream = nccl, ops.stream  # type: ignore[attr-defined]
        self._side = cupy.cuda.Stream(non_blocking=True)
        self._types = {
            np.dtype(np.float32): nccl.NCCL_FLOAT32,
            np.dtype(np.float64): nccl.NCCL_FLOAT64,
            np.dtype(np.int32): nccl.NCCL_INT32,
            np.dtype(np.int64): nccl.NCCL_INT64,
        }
        unique_id = self.all_gather_object(nccl.get_unique_id() if self.rank == 0 else None)[0]
        try:
            self._communicator = nccl.NcclCommunicator(self.size, unique_id, self.rank)
        except nccl.NcclError as error:
            raise ValueError(
                f"NCCL: rank {self.rank} of {self.size} cannot connect ({error}); "
                "NCCL_DEBUG=INFO in the environment says why"
            ) from None

    def sum(self, array: Array) -> None:
        """See Ranks."""
        self._all_reduce(array, self._nccl.NCCL_SUM)

    def maximum(self, array: Array) -> None:
        """See Ranks."""
        self._all_reduce(array, self._nccl.NCCL_MAX)

    def reduce(self, array: Array, root: int) -> None:
        """See Ranks. A second stream waits for the kernels so far, and then sums."""
        self._side.wait_event(self._stream.record())
        address, kind, add = array.data.ptr, self._types[array.dtype], self._nccl.NCCL_SUM
        self._communicator.reduce(address, address, array.size, kind, add, root, self._side.ptr)

    def join(self) -> None:
        """See Ranks."""
        self._stream.wait_event(self._side.record())

    def reduce_scatter(self, flat: Array, bounds: Sequence[int]) -> None:
        """See Ranks."""
        kind, add, stream = self._types[flat.dtype], self._nccl.NCCL_SUM, self._stream.ptr
        parts = [flat[begin:end] for begin, end in pairwise(bounds)]
        if len({part.size for part in parts}) == 1:
            own = parts[self.rank]
            self._communicator.reduceScatter(flat.data.ptr, own.data.ptr, own.size, kind, add, stream)
            return
        self._nccl.groupStart()
        for root, part in enumerate(parts):
            if part.size:
                self._communicator.reduce(part.data.ptr, part.data.ptr, part.size, kind, add, root, stream)
        self._nccl.groupEnd()

    def all_gather(self, flat: Array, bounds: Sequence[int]) -> None:
        """See Ranks."""
        parts = [flat[begin:end] for begin, end in pairwise(bounds)]
        if len({part.size for part in parts}) == 1:
            own, nccl = parts[self.rank], self._nccl
            address = own.data.ptr, flat.data.ptr
            self._communicator.allGather(*address, own.nbytes, nccl.NCCL_UINT8, self._stream.ptr)
            return
        self._nccl.groupStart()
        for root, part in enumerate(parts):
            if part.size:
                self.broadcast(part, root)
        self._nccl.groupEnd()

    def broadcast(self, array: Array, root: int = 0) -> None:
        """See Ranks."""
        address, kind = array.data.ptr, self._nccl.NCCL_UINT8
        self._communicator.broadcast(address, address, array.nbytes, kind, root, self._stream.ptr)

    def _all_reduce(self, array: Array, operation: int) -> None:
        assert array.dtype != BF16, "bf16 is held as uint16, which NCCL would add as integers"
        address, kind = array.data.ptr, self._types[array.dtype]
        self._communicator.allReduce(address, address, array.size, kind, operation, self._stream.ptr)


def _missing(why: object) -> ValueError:
    return ValueError(
        f"several GPUs need NCCL ({why}): python -m pip install -r requirements-cuda.lock; "
        "or set runtime.gpus=1"
    )
