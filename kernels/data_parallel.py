"""What ranks do together: the shared part of an update, and collecting and distributing whole arrays.

An update of several ranks, with what each array holds when the step is done:

    micro-steps     gradients: the sums over this rank's micro-batches
    sum_gradients   gradients[summed]: the sums over all ranks. Loss sums and FP8 maxima likewise
    square_sums     of gradients[summed], then of all chunks
    optimizer       parameters[own], compute weights[own]
    share_weights   compute weights, and what the residual stream reads: from their owners

Without shard_optimizer, sum_gradients also gathers the sums, and every rank updates everything. With overlap,
the last micro-step sums each block's gradients as soon as they are finished, and sum_gradients the rest.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from kernels.arena import Arena
from kernels.ops import Ops
from kernels.parameters import Parameter, named, stream_parameters
from kernels.ranks import Ranks
from kernels.split import Split

Array = np.ndarray[Any, Any]


class DataParallel:
    """The ranks of an engine.

    Args:
        ranks: the collectives.
        split: what this rank sums and updates.
        ops, arena, table: of the engine.
        overlap: whether gradients are summed during the last micro-step.
    """

    def __init__(
        self, ranks: Ranks, split: Split, ops: Ops, arena: Arena, table: list[Parameter], *, overlap: bool
    ) -> None:
        self.ranks, self.ops, self._split, self._arena, self._table = ranks, ops, split, arena, table
        self._stream_weights = _StreamWeights(split, ops, arena, table) if "stream_weights" in arena else None
        # The backward pass finishes the blocks in the order of the flat arrays: these are their ends.
        self._block_ends = {p.layer: p.offset + p.padded_size for p in table if p.name.startswith("blocks.")}
        self._overlap = overlap
        self._summed_until = 0  # the gradients before this element have been summed by the last micro-step

    def begin_micro_step(self, last: bool) -> bool:
        """Whether this micro-step must call sum_block; only the last one of an update ever does."""
        if last and self._overlap:
            self._summed_until = self._block_ends[0]
        return last and self._overlap

    def sum_block(self, layer: int) -> None:
        """Starts to sum the gradients that the backward pass has finished with this block."""
        self._reduce(self._block_ends.get(layer + 1, 0), self._block_ends[layer])

    def _reduce(self, begin: int, end: int) -> None:
        """Starts to sum the gradients of a range, each on the rank that sums it."""
        for root, (start, stop) in enumerate(pairwise(self._split.summed)):
            part = slice(max(start, begin), min(stop, end))
            if part.start < part.stop:
                self.ranks.reduce(self._gradients[part], root)

    @property
    def _gradients(self) -> Array:
        return self._arena.whole("gradients")

    def sum_gradients(self) -> None:
        """Sums gradients, losses and FP8 maxima over all ranks."""
        gradients = self._gradients
        if self._summed_until:
            self._reduce(self._summed_until, self._split.size)
            self.ranks.join()
        else:
            self.ranks.reduce_scatter(gradients, self._split.summed)
        self._summed_until = 0
        if not self._split.sharded:
            self.ranks.all_gather(gradients, self._split.summed)
        self.ranks.sum(self._arena.whole("nll_sums"))
        if "fp8_amax" in self._arena:
            self.ranks.maximum(self._arena.whole("fp8_amax"))

    def square_sums(self) -> Array:
        """The sum of the squared gradients of each chunk, on every rank. Afterwards, gradients that one rank
        has summed for another are with their owner, too.
        """
        sums, own_summed, chunk = self._arena.whole("square_sums"), self._split.own_summed, self._split.chunk
        if self.ranks.size > 1:
            self.ops.fill_zero(sums)
        if own_summed.start < own_summed.stop:
            own_chunks = slice(own_summed.start // chunk, -(-own_summed.stop // chunk))
            self.ops.square_sums(sums[own_chunks], self._gradients[own_summed])
        self.ranks.sum(sums)  # the other ranks' terms are 0
        if self._split.sharded:
            for part, root in self._split.summed_for_others():
                self.ranks.broadcast(self._gradients[part], root)
        return sums

    def share_weights(self) -> None:
        """Sends what this rank has updated to the others. Clears this rank's gradients of parameters that
        others own: its optimizer clears only its own.
        """
        if not self._split.sharded:
            return
        shared = "weights" if "weights" in self._arena else "parameters"
        self.ranks.all_gather(self._arena.whole(shared), self._split.owned)
        if self._stream_weights:
            self._stream_weights.share(self.ranks)
        gradients, own = self._gradients, self._split.own
        for part in (slice(0, own.start), slice(own.stop, self._split.size)):
            if part.start < part.stop:
                self.ops.fill_zero(gradients[part])

    def stream_weights(self) -> Mapping[str, Array]:
        """What the residual stream reads, by name."""
        return (
            self._stream_weights.named
            if self._stream_weights
            else named(self._arena.whole("parameters"), self._table)
        )

    def collect(self, name: str) -> Array:
        """A host copy of a whole flat array whose parts lie on their owners: on rank 0, elsewhere empty.

        A rank that holds only its part of the array uses the gradients' memory as the buffer. The gradients
        are lost, and zero afterwards.
        """
        flat = self._arena.whole(name)
        source = flat if flat.size == self._split.size else self._gradients
        if source is not flat:
            self.ops.copy(source[self._split.own], flat)
            self.ranks.all_gather(source, self._split.owned)
        found = np.empty(0)
        if self.ranks.rank == 0:
            found = self.ops.download(source)[: self._split.used]
        if source is not flat:
            self.ops.fill_zero(source)
        return found

    def distribute(self, name: str, whole: Array | None) -> None:
        """Sets every rank's part of a flat array, and the copies of parameters, from a host array of rank 0.

        A rank that holds only its part of the array uses the gradients' memory as the buffer. The gradients
        are lost, and zero afterwards.
        """
        flat, own = self._arena.whole(name), self._split.own
        target = flat if flat.size == self._split.size else self._gradients
        if self.ranks.rank == 0:
            assert whole is not None
            self.ops.upload(target[: self._split.used], whole)
        self.ranks.broadcast(target)
        if name == "parameters" and "weights" in self._arena:
            self.ops.cast(self._arena.whole("weights"), target)
        if name == "parameters" and self._stream_weights:
            self._stream_weights.copy_from(target)
        if target is not flat:
            self.ops.copy(flat, target[own])
            self.ops.fill_zero(target)

    def first_nonfinite(self) -> str | None:
        """The first parameter, in the order of the forward pass, whose value or gradient is not finite on
        its owner.
        """
        own, params = self._split.own, self._arena.whole("parameters")
        kinds = (
            ("", params if params.size == self._split.own_size else params[own]),
            (
                "gradient of ",
                self._gradients[own],
            ),
        )
        # Later ranks own what earlier layers use.
        return next(filter(None, reversed(self.ranks.all_gather_object(self._first_nonfinite(kinds)))), None)

    def _first_nonfinite(self, kinds: Iterable[tuple[str, Array]]) -> str | None:
        own = self._split.own
        for p in reversed(self._table):
            part = slice(max(p.offset, own.start) - own.start, min(p.offset + p.size, own.stop) - own.start)
            for kind, flat in kinds if part.start < part.stop else ():
                if not np.isfinite(self.ops.download(flat[part])).all():
                    return kind + p.name
        return None


class _StreamWeights:
    """fp32 copies of the parameters that the residual stream reads, on a rank that owns only a part."""

    def __init__(self, split: Split, ops: Ops, arena: Arena, table: list[Parameter]) -> None:
        self._ops, self._flat, self._own = ops, arena.whole("stream_weights"), split.own
        self._compact = stream_parameters(table)
        self.named = named(self._flat, self._compact)
        names = {p.name for p in self._compact}
        self._whole = [p for p in table if p.name in names]
        # The cuts of the flat array as offsets in the compact one: the stream parameters before each cut.
        self._bounds = [
            sum(min(max(cut - p.offset, 0), p.padded_size) for p in self._whole) for cut in split.owned
        ]
        self._bounds[-1] = self._flat.size
        self._params = arena.whole("parameters")

    def share(self, ranks: Ranks) -> None:
        """Copies own parameters, then gathers the other ranks' ones."""
        self._copy(self._params, self._own)
        ranks.all_gather(self._flat, self._bounds)

    def copy_from(self, params: Array) -> None:
        """Copies from the whole flat array."""
        self._copy(params, slice(0, params.size))

    def _copy(self, params: Array, part: slice) -> None:
        """Copies what lies in a part of the flat array; params is that part."""
        for p, compact in zip(self._whole, self._compact, strict=True):
            begin, stop = max(p.offset, part.start), min(p.offset + p.padded_size, part.stop)
            if begin < stop:
                target = compact.offset + begin - p.offset
                source = params[begin - part.start : stop - part.start]
                self._ops.copy(self._flat[target : target + stop - begin], source)
