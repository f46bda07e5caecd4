"""Ranks: the processes that train one model together, and the collectives between them.

    sum, maximum      array = the sum, or the maximum, of the ranks' arrays
    reduce            the root's array = the sum of the ranks' arrays, beside later work until `join`
    reduce_scatter    own part of flat = the sum of that part over all ranks
    all_gather        flat = each rank's own part
    broadcast         array = the root's array
    all_gather_object values of the host, from every rank to every rank

A flat array is cut at `bounds`: rank r's own part is flat[bounds[r] : bounds[r + 1]]. All ranks call the same
collectives in the same order. A `Link` connects the processes. `Ranks` are the collectives for arrays of the
host. kernels/cuda/nccl.py has those for arrays of the GPU; kernels/devices.py chooses.

Determinism: sums add the ranks' arrays in the order of the ranks, so all ranks get the same bits, whatever
the bounds.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

Array = np.ndarray[Any, Any]
Item = TypeVar("Item")
MPIEXEC_OUTPUT_S = (
    0.5  # in which mpiexec passes on what a rank has printed; after an abort it may drop the rest
)
# Errors of other ranks are reported so much later: an error that all ranks have is rank 0's to tell.
OTHER_ERROR_DELAY_S = 1.0 + MPIEXEC_OUTPUT_S


class Link(Protocol):
    """The connection of this process to the others.

    Args:
        rank: number of this process, from 0.
        size: number of processes.
        local_rank: number of this process on its machine, from 0.
        note: for error messages, such as the last saved step.
    """

    rank: int
    size: int
    local_rank: int
    note: str

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """Send values[r] to rank r. Returns what each rank sent to this one.

        Raises:
            RankLost: another rank has ended.
        """

    def fail(self, error: str) -> None:
        """Print the error of this rank, once for all ranks, and end the others. This rank ends next."""

    def close(self) -> None:
        """End without an error."""


class RankLost(Exception):  # noqa: N818 - it names what happened
    """Another rank has ended, so this one cannot go on."""


class Alone:
    """The link of a process that trains alone."""

    rank, size, local_rank = 0, 1, 0
    note = ""

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """The values themselves."""
        return list(values)

    def fail(self, error: str) -> None:
        """Nobody needs to know."""

    def close(self) -> None:
        """Nobody waits."""


ALONE = Alone()


class MpiLink:
    """The processes of `mpiexec`.

    Raises:
        ValueError: mpi4py or an MPI library is missing.
    """

    def __init__(self, local_rank: int = 0) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ValueError(
                f"several CPU ranks need MPI ({error}): python -m pip install mpi4py mpich"
            ) from None
        self._world = MPI.COMM_WORLD
        self.rank, self.size, self.local_rank = self._world.rank, self._world.size, local_rank
        self.note = ""

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """See Link. MPI itself ends all ranks when one ends."""
        return list(self._world.alltoall(list(values)))

    def fail(self, error: str) -> None:
        """Print the error and end all ranks. Of an error that all ranks have, rank 0 tells."""
        if self.rank:
            time.sleep(OTHER_ERROR_DELAY_S)
        print_error(f"rank {self.rank}: {error}" if self.rank else error, self.note)
        time.sleep(MPIEXEC_OUTPUT_S)
        self._world.Abort(1)

    def close(self) -> None:
        """MPI ends the connection itself."""


class Ranks:
    """The collectives, for arrays of the host."""

    def __init__(self, link: Link) -> None:
        self.link, self.rank, self.size = link, link.rank, link.size

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value of each rank."""
        return self.link.exchange([value] * self.size)

    def spread(
        self, count: int, measure: Callable[[int], Item], check: Callable[[], None] = lambda: None
    ) -> Iterator[Item]:
        """measure(0), measure(1), .. measure(count - 1) on every rank; each is computed by one rank.

        Args:
            count: the number of measurements.
            measure: makes one.
            check: called before each round of measurements.
        """
        for first in range(0, count, self.size):
            check()
            mine = first + self.rank
            yield from self.all_gather_object(measure(mine) if mine < count else None)[: count - first]

    def sum(self, array: Array) -> None:
        """array = sum of all ranks' arrays."""
        _add_up(array, self.all_gather_object(array))

    def maximum(self, array: Array) -> None:
        """array = elementwise maximum of all ranks' arrays."""
        np.maximum.reduce(self.all_gather_object(array), out=array)

    def reduce(self, array: Array, root: int) -> None:
        """The root's array = sum of all ranks' arrays.

        Until `join`, later kernels may run beside it, and must not use the array.
        """
        parts = self.link.exchange([array if rank == root else None for rank in range(self.size)])
        if self.rank == root:
            _add_up(array, parts)

    def join(self) -> None:
        """Later kernels find what `reduce` has summed."""

    def reduce_scatter(self, flat: Array, bounds: Sequence[int]) -> None:
        """flat[own] = sum of flat[own] of all ranks. The other parts keep what this rank had."""
        parts = self.link.exchange([flat[begin:end] for begin, end in pairwise(bounds)])
        _add_up(flat[bounds[self.rank] : bounds[self.rank + 1]], parts)

    def all_gather(self, flat: Array, bounds: Sequence[int]) -> None:
        """flat = the own parts of all ranks."""
        own = flat[bounds[self.rank] : bounds[self.rank + 1]]
        for (begin, end), part in zip(pairwise(bounds), self.all_gather_object(own), strict=True):
            flat[begin:end] = part

    def broadcast(self, array: Array, root: int = 0) -> None:
        """array = the root's array."""
        array[...] = self.all_gather_object(array if self.rank == root else None)[root]


def print_error(error: str, note: str) -> None:
    """One line on standard error. A display in a terminal may have hidden the cursor."""
    show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""
    print(f"{show_cursor}error: {'; '.join(filter(None, (error, note)))}", file=sys.stderr, flush=True)


class OneRank(Ranks):
    """The collectives of a process that trains alone, on any device: they have nothing to do."""

    def sum(self, array: Array) -> None:
        """See Ranks."""

    def maximum(self, array: Array) -> None:
        """See Ranks."""

    def reduce(self, array: Array, root: int) -> None:
        """See Ranks."""

    def reduce_scatter(self, flat: Array, bounds: Sequence[int]) -> None:
        """See Ranks."""

    def all_gather(self, flat: Array, bounds: Sequence[int]) -> None:
        """See Ranks."""

    def broadcast(self, array: Array, root: int = 0) -> None:
        """See Ranks."""


def _add_up(total: Array, parts: Sequence[Array]) -> None:
    """total = parts[0] + parts[1] + ..., in this order. `total` may be one of the parts."""
    result = parts[0].copy()
    for part in parts[1:]:
        result += part
    total[...] = result
