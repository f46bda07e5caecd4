"""Micro-batches: every token once, targets one token ahead, and one integer as the position in the data."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.batch import Batch
from stages.batches import BatchPrefetcher, EvalWindows, PretrainBatches, permute_indices, sequential_batch
from stages.shard_format import Counts, ShardSet, open_split, shard_path
from stages.shard_writer import write_index, write_shard

SEPARATOR = 60000


def make_split(folder: Path, stream: np.ndarray, per_shard: int = 50) -> ShardSet:
    pieces = np.split(stream, range(per_shard, len(stream), per_shard))
    files = [
        write_shard(shard_path(folder, "val", number), piece, 65536) for number, piece in enumerate(pieces)
    ]
    counts = Counts(tokens=len(stream), bytes=1, documents=1, files=files)
    write_index(folder, tokenizer_sha256="", vocab_size=65536, splits={"val": counts})
    return open_split(folder, "val", "", 65536)


def pretrain(
    shards: ShardSet, *, micro_batch: int = 3, context: int = 8, within: bool = True, seed: int = 5
) -> PretrainBatches:
    return PretrainBatches(
        shards,
        micro_batch=micro_batch,
        context=context,
        separator_id=SEPARATOR,
        document_mask=within,
        seed=seed,
    )


def windows(shards: ShardSet, *, micro_batch: int = 3, context: int = 8, within: bool = True) -> EvalWindows:
    return EvalWindows(
        shards, micro_batch=micro_batch, context=context, separator_id=SEPARATOR, document_mask=within
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 600), st.integers(0, 2**63), st.integers(0, 1000))
def test_shuffled_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    """Catches a window read twice and another never, at sizes around powers of two and of four."""
    places = np.arange(count)
    assert sorted(permute_indices(places, count, seed, epoch).tolist()) == places.tolist()


def test_shuffled_mixes() -> None:
    """Catches a permutation that keeps order or neighbours: over keys, each of 5! orders of five is about as
    frequent.
    """
    orders: dict[tuple[int, ...], int] = {}
    for key in range(2400):
        drawn = tuple(permute_indices(np.arange(5), 5, key).tolist())
        orders[drawn] = orders.get(drawn, 0) + 1
    assert len(orders) == 120
    # 20 each expected; a count is binomial with a deviation of 4.5, and six deviations are beyond chance.
    assert max(orders.values()) < 20 + 6 * 4.5
    order = permute_indices(np.arange(10_000), 10_000, 1, 2)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.06  # 6 deviations of 1 / sqrt(10,000)


def test_shuffled_is_pinned() -> None:
    """Catches an order that changes with a version or machine, which breaks resuming, and memory that grows
    with count.
    """
    assert permute_indices(np.arange(6), 6, 1337, 0).tolist() == [2, 3, 4, 0, 5, 1]
    assert permute_indices(np.array([0, 1, 10**15]), 10**15 + 1, 7).tolist() == [
        634570131150467,
        783249768905123,
        249663890242967,
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_every_token_is_a_target_once_per_epoch(
    tmp_path_factory: pytest.TempPathFactory, context: int, micro_batch: int, data: st.DataObject
) -> None:
    """Catches windows that overlap, leave gaps, run past the end (a split of exactly one window) or miss
    their last target.
    """
    tokens = data.draw(st.integers(context + 1, 150))
    shards = make_split(tmp_path_factory.mktemp("shards"), np.arange(tokens), per_shard=40)
    batches = pretrain(shards, micro_batch=micro_batch, context=context)
    epoch = data.draw(st.integers(0, 3))
    first, last = epoch * batches.windows, (epoch + 1) * batches.windows
    read = [batches.batch(index) for index in range(first // micro_batch, -(-last // micro_batch))]
    skip = first % micro_batch
    inputs = np.concatenate([batch.tokens for batch in read])[skip : skip + batches.windows]
    targets = np.concatenate([batch.targets for batch in read])[skip : skip + batches.windows]
    seen = np.sort(targets.ravel())
    assert np.array_equal(targets, inputs + 1)
    assert np.array_equal(seen, np.arange(seen[0], seen[0] + len(seen)))  # one stretch, each once
    assert tokens - 1 - len(seen) < 2 * context
    assert all(batch.loss_weight.min() == 1 for batch in read)


def test_epochs_differ_and_leave_out_other_tokens(tmp_path: Path) -> None:
    """Catches the same order and the same window borders in every epoch, which leaves the same tokens unread
    for good.
    """
    batches = pretrain(make_split(tmp_path, np.arange(100)), micro_batch=11, context=8)
    assert batches.windows == 11
    starts = [batches.batch(epoch).tokens[:, 0] for epoch in range(40)]
    assert len({start.min() for start in starts}) == 12  # every offset from 0 to 11 occurs
    assert len({tuple(start - start.min()) for start in starts}) == 40


def test_batch_is_a_function_of_index_and_seed(tmp_path: Path) -> None:
    """Catches hidden state: a resumed run, or a rank that reads every second batch, must read the same
    tokens.
    """
    shards = make_split(tmp_path, np.arange(300))
    straight = pretrain(shards)
    forward = [straight.batch(index).tokens for index in range(30)]
    resumed = pretrain(shards)
    for index in (29, 3, 17, 3):
        assert np.array_equal(resumed.batch(index).tokens, forward[index])
    assert not np.array_equal(pretrain(shards, seed=6).batch(0).tokens, forward[0])


def test_epoch_border_inside_a_batch(tmp_path: Path) -> None:
    """Catches rows dropped or repeated if micro-batches do not divide an epoch, or the split is smaller than
    one.
    """
    batches = pretrain(make_split(tmp_path, np.arange(40)), micro_batch=6, context=8)
    assert batches.windows == 4
    rows = np.concatenate([batches.batch(index).tokens[:, 0] for index in range(2)])
    for epoch in range(3):
        expected = batches.window_starts(epoch, np.arange(4))
        assert np.array_equal(rows[4 * epoch : 4 * epoch + 4], expected)


def test_documents_follow_the_separators(tmp_path: Path) -> None:
    """Catches attention across documents: a document begins at its separator, not after it."""
    shards = make_split(tmp_path, np.array([1, 2, SEPARATOR, 3, SEPARATOR, SEPARATOR, 4, 5, 6]))
    batch = pretrain(shards, micro_batch=1).batch(0)
    assert batch.document.tolist() == [[0, 0, 1, 1, 2, 3, 3, 3]]
    assert batch.targets.tolist() == [[2, SEPARATOR, 3, SEPARATOR, SEPARATOR, 4, 5, 6]]
    assert pretrain(shards, micro_batch=1, within=False).batch(0).document.tolist() == [[0] * 8]
    assert windows(shards, within=False).batch(0).document[0].tolist() == [0] * 8


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_validation_counts_every_target_once(
    tmp_path_factory: pytest.TempPathFactory, context: int, micro_batch: int, data: st.DataObject
) -> None:
    """Catches a dropped last partial window, padding that counts, and a token counted in two windows."""
    tokens = data.draw(st.integers(context + 1, 150))
    shards = make_split(tmp_path_factory.mktemp("shards"), np.arange(tokens), per_shard=40)
    held_out = windows(shards, micro_batch=micro_batch, context=context)
    batches = [held_out.batch(index) for index in range(len(held_out))]
    for batch in batches:
        assert batch.tokens.shape == (micro_batch, context)
        counted = batch.loss_weight == 1
        assert np.array_equal(batch.targets[counted], batch.tokens[counted] + 1)
        assert set(batch.targets[~counted].tolist()) <= {SEPARATOR}
        assert set(np.unique(batch.loss_weight).tolist()) <= {0.0, 1.0}
    targets = np.concatenate([batch.targets[batch.loss_weight == 1] for batch in batches])
    assert targets.tolist() == list(range(1, tokens))
    assert held_out.targets == tokens - 1


def test_validation_padding_is_its_own_document(tmp_path: Path) -> None:
    """Catches padding that shares a document, hence attention and prediction heads, with real tokens."""
    batch = windows(make_split(tmp_path, np.arange(10)), micro_batch=2).batch(0)
    assert batch.document.tolist() == [[0] * 8, [0, 0, 1, 2, 3, 4, 5, 6]]
    assert batch.loss_weight.tolist() == [[1.0] * 8, [1.0] + [0.0] * 7]
    assert batch.targets[1, 0] == 9


def test_too_small_a_split_is_refused_with_numbers(tmp_path: Path) -> None:
    """Catches zero batches, an underflowing window count or a division by zero much later."""
    shards = make_split(tmp_path, np.arange(8))
    for make in (pretrain, windows):
        with pytest.raises(
            ValueError, match=r"split val has 8 tokens and needs 9, one window of model\.context = 8"
        ):
            make(shards)


def test_sequential_batch_is_the_stream(tmp_path: Path) -> None:
    """Catches a loss curve on other tokens than those of the engine it is compared with."""
    shards = make_split(tmp_path, np.arange(100))
    for step in range(4):
        batch = sequential_batch(shards, step, micro_batch=3, context=8)
        assert batch.tokens.ravel().tolist() == list(range(24 * step, 24 * step + 24))
        assert np.array_equal(batch.targets, batch.tokens + 1)
    with pytest.raises(ValueError, match="among its 100"):
        sequential_batch(shards, 4, micro_batch=3, context=8)


def test_arrays_are_what_the_engine_takes(tmp_path: Path) -> None:
    """Catches int64, float64 or strided views, which the engine would refuse or copy at every step."""
    shards = make_split(tmp_path, np.arange(100))
    for batch in (
        pretrain(shards).batch(0),
        windows(shards).batch(0),
        sequential_batch(shards, 0, micro_batch=3, context=8),
    ):
        for name in ("tokens", "targets", "document"):
            assert getattr(batch, name).dtype == np.int32
        assert batch.loss_weight.dtype == np.float32
        assert all(array.shape == (3, 8) and array.flags.c_contiguous for array in vars(batch).values())


def test_updates_batches_come_in_order_each_once_whether_fetched_ahead_or_not() -> None:
    """Catches an update that gets the batches of the next one, fetches its own twice, or fetches after the
    last update.
    """
    asked: list[int] = []

    class Source:
        def batch(self, index: int) -> Batch:
            asked.append(index)
            numbers = np.full((1, 4), index, np.int32)
            return Batch(numbers, numbers, np.zeros_like(numbers), np.ones((1, 4), np.float32))

    prefetcher = BatchPrefetcher(Source(), accum=2, updates=3, mtp_heads=2)
    for step in range(3):
        assert [int(batch.tokens[0, 0]) for batch in prefetcher.get(step)] == [2 * step, 2 * step + 1]
        if step != 1:  # as where nothing calls it
            prefetcher.fetch(step + 1)
    assert asked == list(range(6))
