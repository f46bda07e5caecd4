"""The token shards of a corpus: their layout, their index, and how they are read.

A split is one or more files in llm.c's layout:

    256 x int32, little-endian: 20240520, 1, number of tokens, zeros      then uint16, little-endian, one a token

`index.json` in data/shard says which tokenizer made them. It names each split's files in order, with a CRC-32 of every block
of BLOCK_TOKENS tokens. Files that the stage made lie beside the index. Ready-made ones (`shard.pretokenized`) stay in their own
folder, whose path the index holds as it was given. A stage that finds that folder moved names `shard.pretokenized`.

A block is checked when the first window that touches it is read, and never again in that process. So no pass over the
whole corpus is needed. The first window of a block costs the read and the CRC-32 of 64 KiB: tens of microseconds.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "val")
INDEX = "index.json"
MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
MAX_VOCAB = 65536  # ids are uint16
MAX_TOKENS = 2**31 - 1  # the count is int32
# A larger block makes the first windows slower, a smaller one the index larger: 64 KiB gives 2.4 MB for 20 GB of tokens.
# AMD EPYC, 2026-12: a read from the page cache takes 25 us for 2 KiB and for 64 KiB, the CRC-32 of 64 KiB 15 us.
BLOCK_TOKENS = 1 << 15
CRC_DIGITS = 8  # hexadecimal, a block
MEND = "run: .venv/bin/dvc repro shard"


@dataclass(frozen=True)
class ShardFile:
    """One file of a split.

    Args:
        name: in the folder of the index, or in that of shard.pretokenized.
        tokens: how many.
        crc32: of each block of its tokens, CRC_DIGITS each, one after the other.
    """

    name: str
    tokens: int
    crc32: str


@dataclass(frozen=True)
class Counts:
    """What one split holds.

    Args:
        tokens: ids, separators included.
        bytes: UTF-8 bytes of the documents' text, what bits per byte divides by.
        documents: as many as separators.
        files: in the order of the stream.
    """

    tokens: int
    bytes: int
    documents: int
    files: Sequence[ShardFile]


def shard_path(folder: Path, split: str, number: int) -> Path:
    """Path of one shard of a split."""
    return folder / f"{split}_{number:05d}.bin"


def header(tokens: int) -> bytes:
    """The header of a file of so many tokens."""
    ints = np.zeros(HEADER_INTS, "<i4")
    ints[:3] = MAGIC, VERSION, tokens
    return ints.tobytes()


def block_crc32(data: bytes | memoryview) -> str:
    """CRC-32 of each block of a file's tokens, in hexadecimal; `data` begins where a block begins."""
    starts = range(0, len(data), 2 * BLOCK_TOKENS)
    return "".join(f"{zlib.crc32(data[start : start + 2 * BLOCK_TOKENS]):08x}" for start in starts)


def mend(taken_from: str | None) -> str:
    """The end of a message about a file: what to do. `taken_from` is the folder of ready-made shards, if they are such."""
    return (
        MEND if taken_from is None else f"put the files of shard.pretokenized = {taken_from} back, or {MEND}"
    )


def count_tokens(path: Path, remedy: str = MEND) -> int:
    """The number of tokens in a shard, its header and size validated; `remedy` ends the message of an error."""
    if not path.is_file():
        raise ValueError(f"{path}: not found; {remedy}")
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise ValueError(
            f"{path}: expected a header of {HEADER_BYTES} bytes, found a file of {size}; {remedy}"
        )
    magic, version, tokens = np.fromfile(path, "<i4", 3).tolist()
    if magic != MAGIC:
        raise ValueError(f"{path}: expected magic number {MAGIC}, found {magic}: no token shard; {remedy}")
    if version != VERSION:
        raise ValueError(f"{path}: expected version {VERSION} (uint16 tokens), found {version}; {remedy}")
    if tokens < 1:
        raise ValueError(f"{path}: expected at least 1 token, found a count of {tokens}; {remedy}")
    if size != HEADER_BYTES + 2 * tokens:
        raise ValueError(
            f"{path}: expected {HEADER_BYTES + 2 * tokens} bytes for {tokens} tokens, found {size}; {remedy}"
        )
    return int(tokens)


def read_shard(path: Path) -> "np.memmap[Any, np.dtype[np.uint16]]":
    """One shard's ids as a read-only map of the file; ValueError where the file is not a whole shard."""
    tokens = count_tokens(path)
    return np.memmap(path, "<u2", "r", HEADER_BYTES, (tokens,))


@dataclass(frozen=True)
class ShardSet:
    """One split as one stream of ids, whatever files it lies in. `open_split` makes it.

    Args:
        folder: where index.json is.
        split: "train" or "val".
        vocab_size: every id read is checked to be below it.
        counts: what index.json says, checked against the files' headers.
        paths: the files.
        starts: position in the stream of each file's first token, and the stream's length at the end.
        remedy: ends the message of an error.
    """

    folder: Path
    split: str
    vocab_size: int
    counts: Counts
    paths: Sequence[Path]
    starts: Sequence[int]
    remedy: str
    _checked: dict[int, bytearray] = field(
        default_factory=dict, repr=False
    )  # a file's blocks: 1 once its CRC-32 was right

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return self.counts.tokens

    def read(self, start: int, stop: int) -> NDArray[np.int32]:
        """The ids at start .. stop - 1 of the stream, across files where they lie so.

        Each call opens, reads and closes: no map of the file stays open, so resident memory doesn't grow with what was read.

        Returns:
            (stop - start,) int32, the caller's own.

        Raises:
            ValueError: the range is not in the stream, a file has changed since it was made or opened, or an id is too high.
        """
        if not 0 <= start < stop <= self.tokens:
            raise ValueError(
                f"{self.folder}, split {self.split}: no tokens {start} to {stop} among its {self.tokens}"
            )
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        pieces = []
        while start < stop:
            end = min(stop, self.starts[number + 1])
            pieces.append(self._read_file(number, start - self.starts[number], end - self.starts[number]))
            start, number = end, number + 1
        return np.concatenate(pieces, dtype=np.int32)

    def _read_file(self, number: int, first: int, stop: int) -> NDArray[np.uint16]:
        """Tokens first .. stop - 1 of a file, their blocks checked if they were not yet."""
        path, file = self.paths[number], self.counts.files[number]
        checked = self._checked.setdefault(number, bytearray(-(-file.tokens // BLOCK_TOKENS)))
        block, end_block = first // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        if all(checked[block:end_block]):
            ids = self._load(path, first, stop)
        else:
            start = block * BLOCK_TOKENS
            blocks = self._load(path, start, min(end_block * BLOCK_TOKENS, file.tokens))
            self._check(path, block, blocks, file.crc32)
            checked[block:end_block] = b"\1" * (end_block - block)
            ids = blocks[first - start : stop - start]
        if int(ids.max()) >= self.vocab_size:
            where = first + int(ids.argmax())
            raise ValueError(
                f"{path}: expected ids below {self.vocab_size}, found {ids.max()} at token {where}; {self.remedy}"
            )
        return ids

    def _load(self, path: Path, first: int, stop: int) -> NDArray[np.uint16]:
        ids = np.fromfile(path, "<u2", stop - first, offset=HEADER_BYTES + 2 * first)
        if ids.size != stop - first:
            raise ValueError(
                f"{path}: expected {stop - first} tokens from {first} on, found {ids.size}; {self.remedy}"
            )
        return ids

    def _check(self, path: Path, block: int, ids: NDArray[np.uint16], crc32: str) -> None:
        """Raises ValueError where the blocks from `block` on do not have the CRC-32 of the index."""
        found = block_crc32(ids.view(np.uint8).data)
        for place in range(0, len(found), CRC_DIGITS):
            number = block + place // CRC_DIGITS
            expected = crc32[number * CRC_DIGITS : (number + 1) * CRC_DIGITS]
            if found[place : place + CRC_DIGITS] != expected:
                first, last = (
                    number * BLOCK_TOKENS,
                    min((number + 1) * BLOCK_TOKENS, block * BLOCK_TOKENS + ids.size) - 1,
                )
                problem = f"expected CRC-32 {expected}, found {found[place : place + CRC_DIGITS]}: the file has changed"
                raise ValueError(f"{path}: tokens {first} to {last}: {problem}; {self.remedy}")


def open_split(folder: Path, split: str, tokenizer_sha256: str, vocab_size: int) -> ShardSet:
    """One split, its index and the header and size of all its files validated.

    Args:
        folder: data/shard.
        split: "train" or "val".
        tokenizer_sha256, vocab_size: of the tokenizer in use, which must be the one that made the shards.

    Raises:
        ValueError: a file is missing, foreign, cut short, or made with another tokenizer: the file, what was expected, what
            was found, and the command that mends it.
    """
    index, path = _read_index(folder), folder / INDEX
    if index["tokenizer_sha256"] != tokenizer_sha256:
        found = str(index["tokenizer_sha256"])[:12]
        raise ValueError(
            f"{path}: expected shards of tokenizer {tokenizer_sha256[:12]}, found those of {found}; {MEND}"
        )
    if index["vocab_size"] != vocab_size:
        raise ValueError(
            f"{path}: expected a vocabulary of {vocab_size}, found {index['vocab_size']}; {MEND}"
        )
    if split not in index["splits"]:
        raise ValueError(f"{path}: expected a split {split}, found {', '.join(index['splits'])}; {MEND}")
    counts: Counts = index["splits"][split]
    remedy = mend(index["taken_from"])
    paths = [Path(index["taken_from"] or folder) / file.name for file in counts.files]
    sizes = [count_tokens(file, remedy) for file in paths]
    for file, size, known in zip(paths, sizes, counts.files, strict=True):
        if size != known.tokens:
            raise ValueError(f"{file}: expected {known.tokens} tokens, found {size}; {remedy}")
    starts = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
    return ShardSet(folder, split, vocab_size, counts, paths, starts, remedy)


def _read_index(folder: Path) -> dict[str, Any]:
    """index.json, with the Counts of each split."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{path}: not found: the stage shard has not finished; {MEND}")
    try:
        index = dict(json.loads(path.read_bytes()))
        whole = isinstance(index["tokenizer_sha256"], str) and isinstance(index["vocab_size"], int)
        whole = whole and isinstance(index["taken_from"], str | None)
        index["splits"] = {split: _parse_counts(row) for split, row in index["splits"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):  # ValueError: neither UTF-8 nor JSON
        whole = False
    if not whole:
        raise ValueError(
            f"{path}: expected tokenizer_sha256, vocab_size and splits as the stage shard writes them; {MEND}"
        )
    return index


def _parse_counts(row: dict[str, Any]) -> Counts:
    """A split of index.json; ValueError or TypeError where it is not as the stage writes it."""
    counts = Counts(**{**row, "files": [ShardFile(**file) for file in row["files"]]})
    whole = all(
        type(count) is int and count >= 0 for count in (counts.tokens, counts.bytes, counts.documents)
    )
    for file in counts.files:
        whole = whole and isinstance(file.name, str) and type(file.tokens) is int
        whole = whole and len(file.crc32) == CRC_DIGITS * -(-file.tokens // BLOCK_TOKENS)
    if not whole or counts.tokens != sum(file.tokens for file in counts.files):
        raise ValueError
    return counts
