"""Conversations packed into sequences of the context length, for training and evaluation.

Best-fit decreasing: the longest conversation comes first. Each goes into the fullest row that still has room
for it, or a new row. No conversation is split. The fill of the rows depends only on the lengths, so every
epoch has the same number of rows. The seed decides which conversation of a length goes where, and the order
of the rows.

The rest of a row is filled with <|pad|>, a document of its own with weight 0. Within a row `document` is the
number of the conversation, so attention and positions stay within it.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.batch import Batch
from stages.batches import permute_indices
from stages.chat_template import Rendered

Row = list[int]  # the numbers of the conversations in one sequence, in order


def pack(lengths: Sequence[int], context: int) -> list[Row]:
    """Best-fit packing of lengths in the order given.

    Args:
        lengths: tokens of each conversation, 1 to context; in descending order for best-fit decreasing.
        context: tokens per row.

    Returns:
        Rows of indices into `lengths`; each index is in one row.
    """
    rows: list[Row] = []
    by_room: dict[int, list[int]] = {}  # room left -> its rows, the last used one at the end
    rooms: list[int] = []  # keys of by_room, ascending
    for place, length in enumerate(lengths):
        assert 1 <= length <= context
        best = bisect_left(rooms, length)
        if best < len(rooms):
            room = rooms[best]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[best]
        else:
            room, row = context, len(rows)
            rows.append([])
        rows[row].append(place)
        left = room - length
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(row)
    return rows


class SftBatches:
    """Endless training micro-batches of packed conversations: each conversation once per epoch, every epoch
    in a new order.

    Micro-batch i holds rows i * micro_batch .. (i + 1) * micro_batch - 1 of the endless sequence of epochs,
    so it may span two epochs. Its content depends only on i and the seed. Every row has supervised tokens,
    since every conversation has some.

    Args:
        conversations: of `render_all` for this context.
        micro_batch: rows per batch, B.
        context: tokens per row, T.
        pad_id: id of <|pad|>.
        seed: of the orders, at least 0.
    """

    def __init__(
        self, conversations: Rendered, *, micro_batch: int, context: int, pad_id: int, seed: int
    ) -> None:
        self.conversations, self.micro_batch, self.context = conversations, micro_batch, context
        self.pad_id, self.seed = pad_id, seed
        self._packed_rows = pack(np.sort(conversations.lengths)[::-1].tolist(), context)
        self.rows = len(self._packed_rows)
        self._epoch = -1  # the epoch of _by_length and _order
        self._by_length = self._order = np.empty(0, np.int64)

    def row(self, number: int) -> Row:
        """The conversations of row `number` of the endless sequence of epochs."""
        epoch, row_in_epoch = divmod(number, self.rows)
        if epoch != self._epoch:
            count = len(self.conversations)
            order = permute_indices(np.arange(count), count, self.seed, epoch, 1)
            self._by_length = order[np.argsort(-self.conversations.lengths[order], kind="stable")]
            self._order = permute_indices(np.arange(self.rows), self.rows, self.seed, epoch, 2)
            self._epoch = epoch
        return self._by_length[self._packed_rows[self._order[row_in_epoch]]].tolist()

    def batch(self, index: int) -> Batch:
        """Micro-batch `index` of the run, counted over all updates and ranks."""
        numbers = range(index * self.micro_batch, (index + 1) * self.micro_batch)
        return _fill(self.conversations, [self.row(number) for number in numbers], self.context, self.pad_id)


class EvalConversations:
    """Every conversation once, packed. Rows of only <|pad|> with weight 0 fill the last batch.

    Args: as in SftBatches.
    """

    def __init__(self, conversations: Rendered, *, micro_batch: int, context: int, pad_id: int) -> None:
        self.conversations, self.micro_batch = conversations, micro_batch
        self.context, self.pad_id = context, pad_id
        order = np.argsort(-conversations.lengths, kind="stable")
        self._rows = [
            order[places].tolist() for places in pack(conversations.lengths[order].tolist(), context)
        ]

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self._rows) // self.micro_batch)

    def members(self, index: int) -> list[Row]:
        """The conversations in each row of batch `index`, in the order of `document`; an empty list for a row
        of padding.
        """
        rows = self._rows[index * self.micro_batch : (index + 1) * self.micro_batch]
        return rows + [[] for _ in range(self.micro_batch - len(rows))]

    def batch(self, index: int) -> Batch:
        """Batch `index` of 0 .. len - 1, always of micro_batch rows."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        return _fill(self.conversations, self.members(index), self.context, self.pad_id)


def _fill(conversations: Rendered, rows: list[Row], context: int, pad_id: int) -> Batch:
    """The batch of these rows. The weight at t belongs to the target at t, which is the token at t + 1."""
    tokens: NDArray[np.int32] = np.full((len(rows), context), pad_id, np.int32)
    document = np.empty((len(rows), context), np.int32)
    weight = np.zeros((len(rows), context + 1), np.float32)  # of each token, and 0 after the last
    for row, members in enumerate(rows):
        start = 0
        document[row] = len(members)  # of the padding
        for number, member in enumerate(members):
            ids, supervised = conversations[member]
            end = start + len(ids)
            tokens[row, start:end] = ids
            document[row, start:end] = number
            weight[row, start:end] = supervised
            start = end
    # A conversation opens with a special token of weight 0, so no target with weight belongs to another
    # conversation.
    loss_weight = np.ascontiguousarray(weight[:, 1:])
    targets = np.concatenate((tokens[:, 1:], np.full((len(rows), 1), pad_id, np.int32)), axis=1)
    return Batch(tokens, targets, document, loss_weight)
