"""Micro-batches of the tokens of a split: for training, for validation and in order.

A window is `context` input tokens and the token that follows each of them. Neighbouring windows share one
token: the last target of one is the first input of the next. So in a pass over a
whole split (EvalWindows) every token except the very first is a target once.

The tokens of a micro-batch depend only on its global number and the seed. The position in the data is
therefore one integer, whatever the number of accumulated micro-batches, and a resumed run reads the next
tokens.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.batch import Batch, prepare
from stages.shard_format import ShardSet

ROUNDS = 6  # of the Feistel network; four suffice in theory, and the cost is negligible


class Batches(Protocol):
    """Training micro-batches; the content of each depends only on its number, counted over the whole run."""

    def batch(self, index: int) -> Batch:
        """Micro-batch `index`."""


class BatchPrefetcher:
    """Prefetches a rank's micro-batches of an update while a GPU computes the previous one.

    Rank r of R takes the r-th of R equal parts of an update's micro-batches.

    Args:
        source: the micro-batches of the run.
        accum: micro-batches per update, a multiple of the ranks.
        updates: number of updates of the run.
        mtp_heads: prediction heads of the model.
        rank, ranks: this rank, and the number of ranks.
    """

    def __init__(
        self, source: Batches, accum: int, updates: int, mtp_heads: int, rank: int = 0, ranks: int = 1
    ) -> None:
        self._source, self._updates, self._mtp_heads = source, updates, mtp_heads
        self._accum, self._share = accum, accum // ranks
        self._first = rank * self._share
        self._step, self._batches = -1, list[Batch]()

    def fetch(self, step: int) -> None:
        """Read and prepare the micro-batches of an update, unless this is done or the run has no such
        update.
        """
        if step != self._step and step < self._updates:
            first = step * self._accum + self._first
            self._batches = [self._source.batch(index) for index in range(first, first + self._share)]
            self._step = step
            for batch in self._batches:
                prepare(batch, self._mtp_heads)

    def get(self, step: int) -> list[Batch]:
        """The micro-batches of an update."""
        self.fetch(step)
        return self._batches


def permute_indices(indices: NDArray[np.int64], count: int, *key: int) -> NDArray[np.int64]:
    """Maps each index by a pseudo-random permutation of 0 .. count - 1, without storing the permutation.

    A Feistel network permutes the numbers of 2 * half bits, for any round function. A result outside 0 ..
    count - 1 is permuted again until it is inside ("cycle walking"), which makes it a permutation of that
    range.

    Args:
        indices: (n,) int64, each in 0 .. count - 1.
        count: size of the range, 1 to 2^62.
        key: integers of at least 0, for example seed and epoch; each key gives another permutation.

    Returns:
        (n,) int64. The same on every machine and NumPy version.

    Source: Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains, section 4.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    out = indices.astype(np.uint64)
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        out[outside] = (left << half) | right
        outside = out >= np.uint64(count)
    return out.astype(np.int64)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: each input bit changes about half of the output bits. Source: Steele et
    al. 2014.
    """
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


class PretrainBatches:
    """Endless training micro-batches: epoch after epoch, each in a new order.

    An epoch is `windows` consecutive windows from a random offset, in random order. Up to 2 * context - 1
    tokens at the ends of the stream are skipped, different ones in each epoch. Micro-batch i holds windows i
    * micro_batch .. (i + 1) * micro_batch - 1 of the endless sequence of epochs, so it may span two epochs.

    Args:
        shards: the training split.
        micro_batch: sequences per batch, B.
        context: tokens per sequence, T.
        separator_id: the token before each document in the shards.
        document_mask: whether `document` numbers the documents of a sequence; otherwise it is all zeros.
        seed: of the offsets and orders, at least 0.

    Raises:
        ValueError: the split is smaller than one window.
    """

    def __init__(
        self,
        shards: ShardSet,
        *,
        micro_batch: int,
        context: int,
        separator_id: int,
        document_mask: bool,
        seed: int,
    ) -> None:
        _check_size(shards, context)
        self.shards, self.micro_batch, self.context, self.seed = shards, micro_batch, context, seed
        self.separator_id, self.document_mask = separator_id, document_mask
        # The same in every epoch, so that the number of a window gives its epoch.
        self.windows = max(1, (shards.tokens - context) // context)

    def window_starts(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Position in the stream of the first token of windows, given their places (n,) in the order of an
        epoch.
        """
        offsets = self.shards.tokens - self.windows * self.context  # each leaves room for the last target
        # The 1 gives another key than that of the order.
        random = np.random.SeedSequence((self.seed, epoch, 1)).generate_state(1, np.uint64)
        offset = int(random[0] % np.uint64(offsets))
        return offset + self.context * permute_indices(places, self.windows, self.seed, epoch)

    def batch(self, index: int) -> Batch:
        """Micro-batch `index` of the run, counted over all updates; every target has weight 1."""
        numbers = np.arange(index * self.micro_batch, (index + 1) * self.micro_batch)
        starts = np.empty_like(numbers)
        for epoch in np.unique(numbers // self.windows):
            in_epoch = numbers // self.windows == epoch
            starts[in_epoch] = self.window_starts(int(epoch), numbers[in_epoch] % self.windows)
        rows = np.stack([self.shards.read(start, start + self.context + 1) for start in starts.tolist()])
        return _batch(rows, self.separator_id if self.document_mask else None)


class EvalWindows:
    """A whole split, once, in windows of the context that don't overlap.

    Every token except the very first is a target once, with weight 1. That includes separators. A
    separator opens a document, so as a target it says that the one before has ended. It counts 0 bytes. After
    the end of the split, the last batch is padded with separators of weight 0, each a document of its own.

    Args: as in PretrainBatches.

    Raises:
        ValueError: the split is smaller than one window.
    """

    def __init__(
        self, shards: ShardSet, *, micro_batch: int, context: int, separator_id: int, document_mask: bool
    ) -> None:
        _check_size(shards, context)
        self.shards, self.micro_batch, self.context = shards, micro_batch, context
        self.separator_id, self.document_mask = separator_id, document_mask
        self.targets = shards.tokens - 1

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.targets // (self.micro_batch * self.context))

    def batch(self, index: int) -> Batch:
        """Batch `index` of 0 .. len - 1, always of micro_batch sequences."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        size = self.micro_batch * self.context
        first = index * size
        last = min(first + size, self.targets)
        flat = np.full(size + 1, self.separator_id, dtype=np.int32)
        flat[: last - first + 1] = self.shards.read(first, last + 1)
        weight = (np.arange(size) < last - first).astype(np.float32)
        return _batch(_rows(flat, self.context), self.separator_id if self.document_mask else None, weight)


def sequential_batch(shards: ShardSet, step: int, *, micro_batch: int, context: int) -> Batch:
    """Tokens step * B * T to (step + 1) * B * T inclusive, in order, one document per sequence: to compare
    with other engines.

    Raises:
        ValueError: the split has fewer tokens.
    """
    size = micro_batch * context
    return _batch(_rows(shards.read(step * size, (step + 1) * size + 1), context), None)


def _check_size(shards: ShardSet, context: int) -> None:
    if shards.tokens < context + 1:
        raise ValueError(
            f"{shards.folder}: split {shards.split} has {shards.tokens} tokens and needs {context + 1}, "
            f"one window of model.context = {context} and its last target; add text or set a smaller "
            "model.context"
        )


def _rows(flat: NDArray[np.int32], context: int) -> NDArray[np.int32]:
    """(B * T + 1,) consecutive tokens -> (B, T + 1) windows; neighbours share one token."""
    return np.concatenate((flat[:-1].reshape(-1, context), flat[context::context, None]), axis=1)


def _batch(
    rows: NDArray[np.int32], separator_id: int | None, weight: NDArray[np.float32] | None = None
) -> Batch:
    """(B, T + 1) windows -> a batch; with a separator_id, each separator starts a new document."""
    tokens, targets = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
    document = (
        np.zeros_like(tokens)
        if separator_id is None
        else np.cumsum(tokens == separator_id, axis=1, dtype=np.int32)
    )
    loss_weight = np.ones(tokens.shape, np.float32) if weight is None else weight.reshape(tokens.shape)
    return Batch(tokens, targets, document, loss_weight)
