"""How the flat arrays are split among ranks.

Every rank computes the gradients of all parameters, each on its own micro-batches. Then a rank sums one part
of the gradients over all ranks, and updates one part of the parameters (ZeRO, stage 1):

    flat array   |--- rank 0 ---|--- rank 1 ---|--- rank 2 ---|
    summed       cut at multiples of a chunk of ops.square_sums, so that the same summed gradient gives the
                 same norm bit for bit, however many ranks compute it
    owned        where the optimizer cuts; optimizer state and master weights exist only there

AdamW cuts where the sums are cut. Muon cuts between matrices; a sum is then cut at the next chunk, and the
elements between the two are sent to their owner.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """The parts of one rank and of all ranks.

    Args:
        rank: this rank.
        used: elements of the flat arrays without padding for the ranks.
        chunk: elements of a chunk of ops.square_sums.
        owned: (ranks + 1,) offsets: rank r updates owned[r] to owned[r + 1].
        sharded: whether a rank updates only what it owns. Otherwise every rank updates everything.
    """

    rank: int
    used: int
    chunk: int
    owned: tuple[int, ...]
    sharded: bool

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.owned) - 1

    @property
    def size(self) -> int:
        """Elements of a whole flat array."""
        return self.owned[-1]

    @property
    def own(self) -> slice:
        """What this rank updates."""
        return slice(*self.owned[self.rank : self.rank + 2]) if self.sharded else slice(0, self.size)

    @property
    def own_size(self) -> int:
        """Elements that this rank updates."""
        return self.own.stop - self.own.start

    @property
    def summed(self) -> tuple[int, ...]:
        """(ranks + 1,) offsets: rank r sums the gradients of summed[r] to summed[r + 1]."""
        inner = (min(-(-cut // self.chunk) * self.chunk, self.size) for cut in self.owned[1:-1])
        return 0, *inner, self.size

    @property
    def chunks(self) -> int:
        """Chunks of the whole gradient."""
        return -(-self.used // self.chunk)

    @property
    def own_summed(self) -> slice:
        """The gradients that this rank sums, without padding."""
        begin, end = (min(cut, self.used) for cut in self.summed[self.rank : self.rank + 2])
        return slice(begin, end)

    def summed_for_others(self) -> list[tuple[slice, int]]:
        """Parts of the gradients whose owner is not the rank that sums them, with the rank that does."""
        found = []
        for cut, summed in zip(self.owned[1:-1], self.summed[1:-1], strict=True):
            if cut < summed:
                found.append((slice(cut, summed), self._summing_rank(cut)))
        return found

    def _summing_rank(self, element: int) -> int:
        return max(rank for rank in range(self.ranks) if self.summed[rank] <= element)


def one_rank(used: int, chunk: int = 4096) -> Split:
    """A process that trains alone; the chunk is the CPU's."""
    return Split(0, used, chunk, (0, used), sharded=True)


def equal_cuts(used: int, ranks: int, chunk: int) -> tuple[int, ...]:
    """(ranks + 1,) offsets of equal parts of whole chunks; the last parts may be padding."""
    part = -(-used // (ranks * chunk)) * chunk
    return tuple(rank * part for rank in range(ranks + 1)) if ranks > 1 else (0, used)


def balanced_cuts(pieces: Sequence[tuple[int, float]], ranks: int) -> tuple[int, ...]:
    """(ranks + 1,) offsets that give each rank consecutive pieces, so that the most work of a rank is as
    small as can be.

    Args:
        pieces: (elements, work) of each piece, in the order of the flat array.
        ranks: number of parts. Parts may be empty.
    """
    low, high = max(work for _, work in pieces), sum(work for _, work in pieces)
    for _ in range(50):  # bisection of the limit; 50 halvings exhaust a double
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(pieces, middle)) <= ranks else (middle, high)
    cuts = _filled(pieces, high)
    return 0, *cuts, *(cuts[-1:] * (ranks - len(cuts)))


def _filled(pieces: Sequence[tuple[int, float]], limit: float) -> list[int]:
    """The ends of parts that each take pieces until the next would exceed the limit."""
    ends, end, load = [], 0, 0.0
    for elements, work in pieces:
        if load + work > limit and load:
            ends.append(end)
            load = 0.0
        end, load = end + elements, load + work
    return [*ends, end]
