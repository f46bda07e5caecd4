"""Packing: no conversation split, lost or doubled, and a weight that belongs to the target at its place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.batch import Batch
from stages.chat_template import Rendered
from stages.packing import EvalConversations, SftBatches, pack

PAD, USER, ASSISTANT, END = 1, 2, 3, 4


def rendered(lengths: list[int], seed: int = 0) -> Rendered:
    """Conversations of given lengths (at least 3): <|user|>, text of which some is supervised, <|end|>, which
    is supervised.

    The text of conversation n is the numbers from 1000 n on, so that every token says where it belongs.
    """
    rng = np.random.default_rng(seed)
    ids = [
        np.array([USER, *range(1000 * (n + 1), 1000 * (n + 1) + length - 2), END], np.int32)
        for n, length in enumerate(lengths)
    ]
    supervised = [np.array([False, *(rng.random(length - 2) < 0.5), True]) for length in lengths]
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    return Rendered(np.concatenate(ids), np.concatenate(supervised), starts, {})


def unpack(batch: Batch) -> list[list[tuple[list[int], list[bool]]]]:
    """For each row, the (ids, supervised) of each document except the padding, read back from the batch."""
    result = []
    for tokens, targets, document, weight in zip(*vars(batch).values(), strict=True):
        assert np.array_equal(targets, np.append(tokens[1:], PAD))
        padding = tokens == PAD
        assert set(weight.tolist()) <= {0.0, 1.0}
        assert np.diff(document).min(initial=0) >= 0
        row = []
        for number in np.unique(document[~padding]).tolist():
            (places,) = np.nonzero(document == number)
            assert not padding[places].any()
            assert np.array_equal(places, np.arange(places[0], places[-1] + 1))
            # The weight at t belongs to the token at t + 1; the first token is never supervised, nor the one
            # after the last.
            assert weight[places[-1]] == 0
            row.append((tokens[places].tolist(), [False, *(weight[places[:-1]] == 1).tolist()]))
        assert not weight[padding].any()
        assert len(np.unique(document[padding])) <= 1
        result.append(row)
    return result


lengths_strategy = st.lists(st.integers(3, 20), min_size=1, max_size=40)


def conversations_of(data: Rendered) -> list[tuple[list[int], list[bool]]]:
    return [(ids.tolist(), supervised.tolist()) for ids, supervised in (data[n] for n in range(len(data)))]


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60))
def test_pack_places_each_once_within_the_room(lengths: list[int]) -> None:
    """Catches a conversation lost, doubled or beyond the row, and more rows than best-fit can need."""
    rows = pack(lengths, 20)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    filled = sorted(sum(lengths[place] for place in row) for row in rows)
    assert all(0 < size <= 20 for size in filled)
    # A row is opened only if no other row has room, so any two rows together hold more than one row's
    # context.
    assert len(filled) < 2 or filled[0] + filled[1] > 20


def test_pack_takes_the_row_with_the_least_room() -> None:
    """Catches first-fit, which leaves more padding: 4 belongs after 6, not after 5, though that row came
    first.
    """
    assert pack([5, 6, 4, 5], 10) == [[0, 3], [1, 2]]


@settings(deadline=None)
@given(lengths_strategy, st.integers(1, 5), st.integers(0, 3))
def test_unpacking_an_epoch_gives_back_every_conversation(
    lengths: list[int], micro_batch: int, epoch: int
) -> None:
    """Catches conversations split, dropped, repeated or mixed, weights shifted by one, and a row with nothing
    to learn.
    """
    data = rendered(lengths)
    batches = SftBatches(data, micro_batch=micro_batch, context=20, pad_id=PAD, seed=3)
    first, last = epoch * batches.rows, (epoch + 1) * batches.rows
    read = [batches.batch(index) for index in range(first // micro_batch, -(-last // micro_batch))]
    assert all((batch.loss_weight.sum(axis=1) > 0).all() for batch in read)
    rows = [row for batch in read for row in unpack(batch)][first % micro_batch :][: batches.rows]
    assert sorted(one for row in rows for one in row) == sorted(conversations_of(data))


@settings(deadline=None)
@given(lengths_strategy, st.integers(1, 5))
def test_evaluation_has_every_conversation_once(lengths: list[int], micro_batch: int) -> None:
    """Catches held-out conversations dropped with the last partial batch, and a wrong map from documents to
    conversations.
    """
    data = rendered(lengths)
    held_out = EvalConversations(data, micro_batch=micro_batch, context=20, pad_id=PAD)
    every, seen = conversations_of(data), []
    for index in range(len(held_out)):
        batch = held_out.batch(index)
        assert batch.tokens.shape == (micro_batch, 20)
        for row, members in zip(unpack(batch), held_out.members(index), strict=True):
            assert row == [every[member] for member in members]
            seen += members
    assert sorted(seen) == list(range(len(data)))
    assert held_out.members(len(held_out) - 1)[0]  # no batch of only padding
    with pytest.raises(IndexError):
        held_out.batch(len(held_out))


def test_weight_at_the_first_response_token() -> None:
    """Catches the off-by-one that trains on <|assistant|>, or leaves out the first word of the answer."""
    ids = np.array([USER, 50, END, ASSISTANT, 60, END], np.int32)
    data = Rendered(ids, np.array([False, False, False, False, True, True]), np.array([0, 6]), {})
    batch = SftBatches(data, micro_batch=1, context=8, pad_id=PAD, seed=0).batch(0)
    assert batch.tokens.tolist() == [[USER, 50, END, ASSISTANT, 60, END, PAD, PAD]]
    assert batch.targets.tolist() == [[50, END, ASSISTANT, 60, END, PAD, PAD, PAD]]
    assert batch.loss_weight.tolist() == [[0, 0, 0, 1, 1, 0, 0, 0]]
    assert batch.document.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1]]


def test_conversation_as_long_as_the_context() -> None:
    """Catches a last token beyond the row, and its <|end|> left out of the loss."""
    batch = EvalConversations(rendered([20]), micro_batch=1, context=20, pad_id=PAD).batch(0)
    assert batch.targets[0, -2:].tolist() == [END, PAD]
    assert batch.loss_weight[0, -2:].tolist() == [1, 0]


def test_batch_is_a_function_of_index_and_seed() -> None:
    """Catches hidden state, such as the order of the epoch that was read last: resuming must read the
    same.
    """
    data = rendered([3 + n % 9 for n in range(50)])
    straight = SftBatches(data, micro_batch=4, context=20, pad_id=PAD, seed=3)
    forward = [straight.batch(index).tokens for index in range(40)]
    resumed = SftBatches(data, micro_batch=4, context=20, pad_id=PAD, seed=3)
    for index in (39, 0, 17, 5, 17):
        assert np.array_equal(resumed.batch(index).tokens, forward[index])
    other = SftBatches(data, micro_batch=4, context=20, pad_id=PAD, seed=4)
    assert not np.array_equal(other.batch(0).tokens, forward[0])


def test_epochs_pack_in_another_order() -> None:
    """Catches the same rows in every epoch: neither their order nor their members may stay."""
    batches = SftBatches(rendered([4] * 20), micro_batch=4, context=20, pad_id=PAD, seed=3)
    assert batches.rows == 4
    epochs = [[tuple(batches.row(4 * epoch + place)) for place in range(4)] for epoch in range(10)]
    assert len({tuple(rows) for rows in epochs}) == 10
    assert len({frozenset(map(frozenset, rows)) for rows in epochs}) == 10


def test_arrays_are_what_the_engine_takes() -> None:
    """Catches int64, float64 or strided views, which the engine would refuse or copy at every step."""
    data = rendered([5, 6, 7])
    for batch in (
        SftBatches(data, micro_batch=2, context=20, pad_id=PAD, seed=0).batch(0),
        EvalConversations(data, micro_batch=2, context=20, pad_id=PAD).batch(0),
    ):
        for name in ("tokens", "targets", "document"):
            assert getattr(batch, name).dtype == np.int32
        assert batch.loss_weight.dtype == np.float32
        assert all(array.shape == (2, 20) and array.flags.c_contiguous for array in vars(batch).values())
