"""Micro-batches of a split's tokens, for training, for validation and in order.

A window is `context` tokens and the `context` tokens that follow each of them, so neighbouring windows share one token: the
last target of one is the first input of the next, and every token but the very first is a target once.

Which tokens a micro-batch holds depends on its global number and the seed alone. The place in the data is therefore one
integer, whatever the number of updates, accumulated micro-batches or ranks, and a resumed run reads what comes next.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.batch import Batch, prepare
from stages.shard_format import ShardSet

ROUNDS = 6  # of the Feistel network; four are enough in theory, more cost nothing beside a step


class Batches(Protocol):
    """Training micro-batches; which tokens one holds depends on its number alone, counted over the whole run."""

    def batch(self, index: int) -> Batch:
        """Micro-batch `index`."""


class BatchPrefetcher:
    """The micro-batches of each update, made ready while a GPU computes the one before.

    Args:
        source: the batches, in training's order.
        accum: micro-batches of an update.
        updates: how many there are.
        mtp_heads: the model's.
    """

    def __init__(self, source: Batches, accum: int, updates: int, mtp_heads: int) -> None:
        self._source, self._accum, self._updates, self._mtp_heads = source, accum, updates, mtp_heads
        self._step, self._batches = -1, list[Batch]()

    def fetch(self, step: int) -> None:
        """Make those of an update ready, if there is such an update and they are not."""
        if step != self._step and step < self._updates:
            first = step * self._accum
            self._batches = [self._source.batch(index) for index in range(first, first + self._accum)]
            self._step = step
            for batch in self._batches:
                prepare(batch, self._mtp_heads)

    def get(self, step: int) -> list[Batch]:
        """Those of an update."""
        self.fetch(step)
        return self._batches


def permute_indices(places: NDArray[np.int64], count: int, *key: int) -> NDArray[np.int64]:
    """Where a pseudo-random permutation of 0 .. count - 1 sends each place; needs no memory beyond `places`.

    A Feistel network permutes the numbers of 2 * half bits, for any round function; numbers that leave 0 .. count - 1 are
    permuted again until they come back ("cycle walking"), which permutes that range.

    Args:
        places: (n,) int64, each in 0 .. count - 1.
        count: size of the range, 1 to 2^62.
        key: integers of at least 0, for example seed and epoch; another key is another permutation.

    Returns:
        (n,) int64. The same on every machine and NumPy version.

    Source: Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains, section 4.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    out = places.astype(np.uint64)
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        out[outside] = (left << half) | right
        outside = out >= np.uint64(count)
    return out.astype(np.int64)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer: every bit of the input changes about half of the output's. Source: Steele et al. 2014."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


class PretrainBatches:
    """Training micro-batches without an end: epoch after epoch, each in a new order.

    An epoch is `windows` windows that lie one after the other from a random offset on, in a random order. Fewer than
    2 * context tokens, at the two ends of the stream, are left out of an epoch, in each epoch others. Micro-batch i holds
    windows i * micro_batch .. (i + 1) * micro_batch - 1 of the endless sequence of epochs, so one may span two epochs.

    Args:
        shards: the training split.
        micro_batch: rows of a batch, B.
        context: tokens of a row, T.
        separator_id: starts each document in the shards.
        document_mask: whether `document` tells a row's documents apart; all zeros otherwise.
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
        # The same in every epoch, so that the epoch of a window follows from its number alone.
        self.windows = max(1, (shards.tokens - context) // context)

    def epoch_windows(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Position in the stream of the first token of the windows at these places (n,) of an epoch's order."""
        offsets = (
            self.shards.tokens - self.windows * self.context
        )  # each leaves room for the last window's last target
        draw = np.random.SeedSequence((self.seed, epoch, 1)).generate_state(
            1, np.uint64
        )  # 1: apart from the order's key
        offset = int(draw[0] % np.uint64(offsets))
        return offset + self.context * permute_indices(places, self.windows, self.seed, epoch)

    def batch(self, index: int) -> Batch:
        """Micro-batch `index` of the run, counted over all updates and ranks; every target has weight 1."""
        numbers = np.arange(index * self.micro_batch, (index + 1) * self.micro_batch)
        starts = np.empty_like(numbers)
        for epoch in np.unique(numbers // self.windows):
            now = numbers // self.windows == epoch
            starts[now] = self.epoch_windows(int(epoch), numbers[now] % self.windows)
        rows = np.stack([self.shards.read(start, start + self.context + 1) for start in starts.tolist()])
        return _batch(rows, self.separator_id if self.document_mask else None)


class EvalWindows:
    """The whole of a split, once, in windows of the context that don't overlap.

    All tokens but the very first are targets with weight 1, each once: `targets` of them, separators among them (they say
    that a document ends, and are 0 bytes of text). What lies behind the end, in the last window's row and in the rows that
    fill the last batch, is filled with separators, each a document of its own, with weight 0.

    Args: as of PretrainBatches.

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
        """The number of batches."""
        return -(-self.targets // (self.micro_batch * self.context))

    def batch(self, index: int) -> Batch:
        """Batch `index` of 0 .. len - 1, always of micro_batch rows."""
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
    """Tokens step * B * T to (step + 1) * B * T inclusive, row by row, as one document a row: for curves beside other engines.

    Raises:
        ValueError: the split ends before that.
    """
    size = micro_batch * context
    return _batch(_rows(shards.read(step * size, (step + 1) * size + 1), context), None)


def _check_size(shards: ShardSet, context: int) -> None:
    if shards.tokens < context + 1:
        raise ValueError(
            f"{shards.folder}: split {shards.split} has {shards.tokens} tokens and needs {context + 1}, "
            f"one window of model.context = {context} and its last target; give it more text or set a smaller model.context"
        )


def _rows(flat: NDArray[np.int32], context: int) -> NDArray[np.int32]:
    """(B * T + 1,) consecutive tokens -> (B, T + 1) windows that share a token with the next."""
    return np.concatenate((flat[:-1].reshape(-1, context), flat[context::context, None]), axis=1)


def _batch(
    rows: NDArray[np.int32], separator_id: int | None, weight: NDArray[np.float32] | None = None
) -> Batch:
    """(B, T + 1) windows -> a batch; documents are told apart by the separator that starts each, if one is given."""
    tokens, targets = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
    document = (
        np.zeros_like(tokens)
        if separator_id is None
        else np.cumsum(tokens == separator_id, axis=1, dtype=np.int32)
    )
    loss_weight = np.ones(tokens.shape, np.float32) if weight is None else weight.reshape(tokens.shape)
    return Batch(tokens, targets, document, loss_weight)
