"""The token shards: the layout that others read, and what is said of files that are not whole."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import shard_format, shard_writer
from stages.shard_format import BLOCK_TOKENS, HEADER_BYTES, Counts, open_split, read_shard, shard_path
from stages.shard_writer import MIN_LAST_SHARD_TOKENS, ShardWriter, write_index, write_shard

SHA = "ab" * 32


def write_split(folder: Path, sizes: list[int], vocab_size: int = 500) -> np.ndarray:
    """A split "val" of given shard sizes, and the stream it holds."""
    stream = np.arange(sum(sizes)) * 7 % vocab_size
    pieces = np.split(stream, np.cumsum(sizes)[:-1])
    files = [
        write_shard(shard_path(folder, "val", number), piece, vocab_size)
        for number, piece in enumerate(pieces)
    ]
    counts = Counts(tokens=len(stream), bytes=3 * len(stream), documents=2, files=files)
    write_index(folder, tokenizer_sha256=SHA, vocab_size=vocab_size, splits={"val": counts})
    return stream


def test_layout_is_the_published_one(tmp_path: Path) -> None:
    """Catches any drift of the layout: the expected bytes are written out by hand, not by the writer's own
    constants.
    """
    write_shard(tmp_path / "a.bin", np.array([1, 258, 65535]), 65536)
    expected = struct.pack("<3i", 20240520, 1, 3) + bytes(4 * 253) + b"\x01\x00\x02\x01\xff\xff"
    assert (tmp_path / "a.bin").read_bytes() == expected
    assert read_shard(tmp_path / "a.bin").tolist() == [1, 258, 65535]


@pytest.mark.parametrize("ids", [[0, 70000], [300], [-1, 5]])
def test_id_outside_the_vocabulary_is_refused_before_the_cast(tmp_path: Path, ids: list[int]) -> None:
    """Catches the silent wrap of uint16 (70000 becomes 4464) and ids that no row of the embedding has."""
    with pytest.raises(ValueError, match="expected 0 to 299"):
        write_shard(tmp_path / "a.bin", np.array(ids, dtype=np.int32), 300)
    assert list(tmp_path.iterdir()) == []


def test_vocabulary_above_uint16_is_refused(tmp_path: Path) -> None:
    """Catches a vocabulary whose ids would wrap, even where this piece of text has none of the high ones."""
    with pytest.raises(ValueError, match=r"vocabulary of 65537.*65536"):
        write_shard(tmp_path / "a.bin", np.array([1]), 65537)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 25), max_size=12), st.integers(1, 20), st.integers(1, 20), st.integers(1, 9))
def test_writer_cuts_the_stream_without_loss(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[int], per_shard: int, last: int, block: int
) -> None:
    """Catches tokens lost or doubled where a piece ends at, before or after a shard's or block's border, a
    last shard that is empty or too short, and a CRC-32 that depends on the pieces in which the tokens
    came."""
    folder = tmp_path_factory.mktemp("shards")
    stream = np.arange(sum(pieces))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_writer, "MIN_LAST_SHARD_TOKENS", last)
        for module in (shard_format, shard_writer):
            patch.setattr(module, "BLOCK_TOKENS", block)
        with ShardWriter(folder, "train", vocab_size=1000, tokens_per_shard=per_shard) as writer:
            for end, size in zip(np.cumsum(pieces), pieces, strict=True):
                writer.add(stream[end - size : end])
        paths = sorted(folder.iterdir())
        shards = [read_shard(path) for path in paths]
        again = [write_shard(path, shard, 1000) for path, shard in zip(paths, shards, strict=True)]
    sizes = [len(shard) for shard in shards]
    assert [path.name for path in paths] == [f"train_{number:05d}.bin" for number in range(len(paths))]
    assert [token for shard in shards for token in shard.tolist()] == stream.tolist()
    assert sizes[:-1] == [per_shard] * (len(shards) - 1)
    least = min(per_shard, last)
    assert not sizes or sizes[-1] < per_shard + least
    assert len(sizes) < 2 or sizes[-1] >= least
    assert (writer.tokens, writer.files) == (len(stream), again)


def test_one_token_too_many_is_joined_to_the_shard_before(tmp_path: Path) -> None:
    """Catches a last shard on which llm.c aborts, at the real size: one token beyond a shard, and one shard
    that is short.
    """
    with ShardWriter(tmp_path, "train", vocab_size=10, tokens_per_shard=3 * MIN_LAST_SHARD_TOKENS) as writer:
        writer.add(np.ones(3 * MIN_LAST_SHARD_TOKENS, np.uint8))
        writer.add(np.ones(1, np.uint8))
    assert [file.tokens for file in writer.files] == [3 * MIN_LAST_SHARD_TOKENS + 1]
    with ShardWriter(tmp_path, "val", vocab_size=10, tokens_per_shard=3 * MIN_LAST_SHARD_TOKENS) as writer:
        writer.add(np.ones(5, np.uint8))
    assert [file.tokens for file in writer.files] == [5]


def test_failure_leaves_no_shard_of_the_final_name(tmp_path: Path) -> None:
    """Catches a half-written shard that looks complete after a crash in the middle of it."""
    with (
        pytest.raises(RuntimeError, match="source failed"),
        ShardWriter(tmp_path, "train", vocab_size=10, tokens_per_shard=4) as writer,
    ):
        writer.add(np.arange(9))
        raise RuntimeError("source failed")
    assert [path.name for path in tmp_path.iterdir()] == ["train_00000.bin"]


def test_shard_sizes_that_the_format_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a count that overflows the header's int32, and a file number of six digits."""
    with pytest.raises(
        ValueError, match=r"shard\.tokens_per_shard: expected 1 to 2146435071 .*got 2146435072"
    ):
        ShardWriter(tmp_path, "train", vocab_size=10, tokens_per_shard=2**31 - MIN_LAST_SHARD_TOKENS)
    monkeypatch.setattr(shard_writer, "MAX_SHARDS", 2)
    writer = ShardWriter(tmp_path, "train", vocab_size=10, tokens_per_shard=1)
    with pytest.raises(ValueError, match="over 2 files; set it higher"):
        writer.add(np.arange(4))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_reads_cross_shard_borders(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    """Catches an off-by-one at a shard's border, where a loader that reads each file alone drops or repeats
    tokens.
    """
    folder = tmp_path_factory.mktemp("shards")
    stream = write_split(folder, sizes)
    split = open_split(folder, "val", SHA, 500)
    start = data.draw(st.integers(0, len(stream) - 1))
    stop = data.draw(st.integers(start + 1, len(stream)))
    ids = split.read(start, stop)
    assert ids.tolist() == stream[start:stop].tolist()
    assert ids.dtype == np.int32
    assert split.counts.bytes == 3 * len(stream)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (5, 11)])
def test_range_outside_the_stream_is_refused(tmp_path: Path, start: int, stop: int) -> None:
    """Catches a read past the end that would come back short, and a negative one that would wrap around."""
    write_split(tmp_path, [4, 6])
    with pytest.raises(ValueError, match="among its 10"):
        open_split(tmp_path, "val", SHA, 500).read(start, stop)


def patch_header(path: Path, place: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    data[4 * place : 4 * place + 4] = struct.pack("<i", value)
    path.write_bytes(data)


def patch_index(folder: Path, old: str, new: str) -> None:
    text = (folder / "index.json").read_text(encoding="utf-8")
    assert old in text
    (folder / "index.json").write_text(text.replace(old, new, 1), encoding="utf-8")


SPOIL = {
    "missing shard": (lambda f: (f / "val_00001.bin").unlink(), r"val_00001\.bin: not found"),
    "cut short": (
        lambda f: (f / "val_00001.bin").write_bytes((f / "val_00001.bin").read_bytes()[:-2]),
        r"val_00001\.bin: expected 1036 bytes for 6 tokens, found 1034",
    ),
    "too long": (
        lambda f: (f / "val_00001.bin").write_bytes((f / "val_00001.bin").read_bytes() + b"\0"),
        r"val_00001\.bin: expected 1036 bytes for 6 tokens, found 1037",
    ),
    "header cut": (
        lambda f: (f / "val_00000.bin").write_bytes(b"\0" * 100),
        "expected a header of 1024 bytes, found a file of 100",
    ),
    "foreign": (
        lambda f: patch_header(f / "val_00000.bin", 0, 7),
        "expected magic number 20240520, found 7: no token shard",
    ),
    "other version": (lambda f: patch_header(f / "val_00000.bin", 1, 2), r"expected version 1 .*found 2"),
    "negative count": (
        lambda f: patch_header(f / "val_00000.bin", 2, -5),
        "expected at least 1 token, found a count of -5",
    ),
    "shard of another run": (
        lambda f: write_shard(f / "val_00001.bin", np.arange(5), 500),
        r"val_00001\.bin: expected 6 tokens, found 5",
    ),
    "longer shard of another run": (
        lambda f: write_shard(f / "val_00001.bin", np.arange(7), 500),
        r"val_00001\.bin: expected 6 tokens, found 7",
    ),
    "sum too large": (
        lambda f: patch_index(f, '"tokens": 10', '"tokens": 11'),
        r"index\.json: expected tokenizer_sha256",
    ),
    "sum too small": (
        lambda f: patch_index(f, '"tokens": 10', '"tokens": 9'),
        r"index\.json: expected tokenizer_sha256",
    ),
    "no file's checksum": (
        lambda f: patch_index(f, '"crc32": "', '"crc32": "0'),
        r"index\.json: expected tokenizer_sha256",
    ),
    "of an earlier version": (
        lambda f: patch_index(f, '"taken_from"', '"other"'),
        r"index\.json: expected tokenizer_sha256",
    ),
    "no index": (
        lambda f: (f / "index.json").unlink(),
        r"index\.json: not found: the stage shard has not finished",
    ),
    "index cut short": (
        lambda f: (f / "index.json").write_text("{", encoding="utf-8"),
        r"index\.json: expected tokenizer_sha256",
    ),
    "index of other keys": (
        lambda f: (f / "index.json").write_text(json.dumps({"splits": {}}), encoding="utf-8"),
        r"index\.json: expected tokenizer_sha256",
    ),
    "index not UTF-8": (
        lambda f: (f / "index.json").write_bytes(b"\xff\xfe"),
        r"index\.json: expected tokenizer_sha256",
    ),
}


@pytest.mark.parametrize("fault", SPOIL)
def test_broken_files_are_named(tmp_path: Path, fault: str) -> None:
    """Catches a reader that trusts a broken file, and a message without file, expected, found or what to
    do.
    """
    write_split(tmp_path, [4, 6])
    spoil, message = SPOIL[fault]
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        open_split(tmp_path, "val", SHA, 500)
    assert str(caught.value).endswith("run: .venv/bin/dvc repro shard")
    assert "\n" not in str(caught.value)


def test_other_tokenizer_or_vocabulary_is_refused(tmp_path: Path) -> None:
    """Catches shards that are decoded with a tokenizer that didn't make them: garbage without an error."""
    write_split(tmp_path, [4, 6])
    with pytest.raises(
        ValueError,
        match=r"expected shards of tokenizer cdcdcdcdcdcd, found those of abababababab; run: \.venv",
    ):
        open_split(tmp_path, "val", "cd" * 32, 500)
    with pytest.raises(ValueError, match=r"expected a vocabulary of 512, found 500; run: \.venv"):
        open_split(tmp_path, "val", SHA, 512)
    with pytest.raises(ValueError, match=r"expected a split train, found val; run: \.venv"):
        open_split(tmp_path, "train", SHA, 500)


def test_file_that_changes_after_opening_is_noticed(tmp_path: Path) -> None:
    """Catches ids past the embedding, and a short read, from files swapped or cut while a long run reads
    them.
    """
    write_split(tmp_path, [4, 6])
    split = open_split(tmp_path, "val", SHA, 500)
    changed = write_shard(tmp_path / "val_00001.bin", np.array([1, 2, 3, 500, 4, 5]), 1000)
    with pytest.raises(
        ValueError, match=r"val_00001\.bin: tokens 0 to 5: expected CRC-32 \w{8}, found \w{8}: the file has"
    ):
        split.read(2, 10)
    split = replace(split, counts=replace(split.counts, files=[split.counts.files[0], changed]))
    with pytest.raises(
        ValueError, match=r"val_00001\.bin: expected ids below 500, found 500 at token 3; run: \.venv"
    ):
        split.read(2, 10)
    write_shard(tmp_path / "val_00001.bin", np.array([1, 2]), 1000)
    with pytest.raises(
        ValueError, match=r"val_00001\.bin: expected 6 tokens from 0 on, found 2; run: \.venv"
    ):
        split.read(2, 10)


FLIPPED = 3 * BLOCK_TOKENS // 2  # a token of the second of three blocks


@pytest.fixture
def flipped(tmp_path: Path) -> Path:
    """A split of two files, the second of three blocks, in whose middle a bit is flipped."""
    write_split(tmp_path, [5, 3 * BLOCK_TOKENS - 7])
    path = tmp_path / "val_00001.bin"
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 2 * FLIPPED] ^= 1
    path.write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("start", [BLOCK_TOKENS, FLIPPED, 2 * BLOCK_TOKENS - 1])
def test_flipped_bit_is_found_by_any_window_of_its_block(flipped: Path, start: int) -> None:
    """Catches a check that looks at the tokens asked for alone, at the file's first block, or at whole files
    that are read.
    """
    split = open_split(flipped, "val", SHA, 500)
    with pytest.raises(
        ValueError,
        match=r"val_00001\.bin: tokens 32768 to 65535: expected CRC-32 .*; run: .*dvc repro shard$",
    ):
        split.read(5 + start, 5 + start + 1)
    split.read(5, 6)  # the block before is checked now, the flipped one still is not
    with pytest.raises(ValueError, match=r"val_00001\.bin: tokens 32768 to 65535"):
        split.read(0, split.tokens)


def test_blocks_are_read_whole_once(flipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check at every window, which would slow training, one that reads blocks nobody asked for, and
    wrong tokens.
    """
    split, hashed = open_split(flipped, "val", SHA, 500), list[int]()
    crc32 = shard_format.block_crc32

    def noted(data: memoryview) -> str:
        hashed.append(len(data))
        return crc32(data)

    monkeypatch.setattr(shard_format, "block_crc32", noted)
    first = split.read(100, 200)
    assert hashed == [2 * BLOCK_TOKENS]
    assert np.array_equal(split.read(100, 200), first)
    assert np.array_equal(split.read(0, BLOCK_TOKENS)[100:200], first)
    assert hashed == [2 * BLOCK_TOKENS, 10]  # then the first file alone
    assert (
        split.read(split.tokens - 3, split.tokens).tolist()
        == (np.arange(split.tokens)[-3:] * 7 % 500).tolist()
    )
    assert hashed == [2 * BLOCK_TOKENS, 10, 2 * BLOCK_TOKENS - 14]


def test_clear_removes_what_an_earlier_run_left(tmp_path: Path) -> None:
    """Catches shards of a longer earlier run that remain next to those of a shorter one, and an index without
    its shards.
    """
    write_split(tmp_path, [4, 6])
    (tmp_path / "val_00002.bin.partial").write_bytes(b"half")
    (tmp_path / "mine.txt").write_text("kept", encoding="utf-8")
    shard_writer.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
