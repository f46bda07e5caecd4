"""The token shards of a corpus: their layout, their index, and how they are read.

A split is one or more files in llm.c's layout:

    256 x int32, little-endian: 20240520, 1, number of tokens, zeros      then uint16, little-endian, one per
    token

`index.json` in data/shard says which tokenizer made them. It names each split's files in order, with a CRC-32
of every block of BLOCK_TOKENS tokens. Files that the stage made are in the folder of the index. Ready-made
ones (`shard.pretokenized`) stay in their own folder, whose path the index holds as it was given. If that
folder moved, the error names `shard.pretokenized`.

A block is checked when the first window that touches it is read, and never again in that process. So no pass
over the whole corpus is needed. The first window of a block costs the read and the CRC-32 of 64 KiB: tens of
microseconds.
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
# Larger blocks slow down the first windows; smaller ones enlarge the index. 64 KiB: an index of 2.4 MB for 20
# GB of tokens. AMD EPYC, 2026-12: a read from the page cache takes 25 us, for 2 KiB as for 64 KiB. The CRC-32
# of 64 KiB takes 15 us.
BLOCK_TOKENS = 1 << 15
CRC_DIGITS = 8  # hexadecimal digits per block
FIX_HINT = "run: .venv/bin/dvc repro shard"


@dataclass(frozen=True)
class ShardFile:
    """One file of a split.

    Args:
        name: in the folder of the index, or in that of shard.pretokenized.
        tokens: their number.
        crc32: CRC-32 of each block of tokens, CRC_DIGITS digits each, concatenated.
    """

    name: str
    tokens: int
    crc32: str


@dataclass(frozen=True)
class Counts:
    """The size of one split, and its files.

    Args:
        tokens: number of ids, separators included.
        bytes: UTF-8 bytes of the documents' text, the divisor of bits per byte.
        documents: number of separators.
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
    """The header of a file of `tokens` tokens."""
    ints = np.zeros(HEADER_INTS, "<i4")
    ints[:3] = MAGIC, VERSION, tokens
    return ints.tobytes()


def block_crc32(data: bytes | memoryview) -> str:
    """CRC-32 of each block of a file's tokens, in hexadecimal. `data` begins at the start of a block."""
    starts = range(0, len(data), 2 * BLOCK_TOKENS)
    return "".join(f"{zlib.crc32(data[start : start + 2 * BLOCK_TOKENS]):08x}" for start in starts)


def fix_hint(taken_from: str | None) -> str:
    """The end of an error message about a file: what to do. `taken_from`: the folder of ready-made shards, if
    any.
    """
    if taken_from is None:
        return FIX_HINT
    return f"put the files of shard.pretokenized = {taken_from} back, or {FIX_HINT}"


def count_tokens(path: Path, hint: str = FIX_HINT) -> int:
    """The number of tokens in a shard. Validates its header and size; `hint` ends the error messages."""
    if not path.is_file():
        raise ValueError(f"{path}: not found; {hint}")
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise ValueError(f"{path}: expected a header of {HEADER_BYTES} bytes, found a file of {size}; {hint}")
    magic, version, tokens = np.fromfile(path, "<i4", 3).tolist()
    if magic != MAGIC:
        raise ValueError(f"{path}: expected magic number {MAGIC}, found {magic}: no token shard; {hint}")
    if version != VERSION:
        raise ValueError(f"{path}: expected version {VERSION} (uint16 tokens), found {version}; {hint}")
    if tokens < 1:
        raise ValueError(f"{path}: expected at least 1 token, found a count of {tokens}; {hint}")
    if size != HEADER_BYTES + 2 * tokens:
        raise ValueError(
            f"{path}: expected {HEADER_BYTES + 2 * tokens} bytes for {tokens} tokens, found {size}; {hint}"
        )
    return int(tokens)


def read_shard(path: Path) -> "np.memmap[Any, np.dtype[np.uint16]]":
    """One shard's ids as a read-only memory map; ValueError if the file is not a complete shard."""
    tokens = count_tokens(path)
    return np.memmap(path, "<u2", "r", HEADER_BYTES, (tokens,))


@dataclass(frozen=True)
class ShardSet:
    """One split as one stream of ids, across its files. `open_split` makes it.

    Args:
        folder: of index.json.
        split: "train" or "val".
        vocab_size: upper bound (exclusive) of the ids, checked in every read.
        counts: from index.json; compared with the files' headers.
        paths: of the files.
        starts: position in the stream of each file's first token; the last entry is the stream's length.
        fix_hint: ends error messages.
    """

    folder: Path
    split: str
    vocab_size: int
    counts: Counts
    paths: Sequence[Path]
    starts: Sequence[int]
    fix_hint: str
    # Of each file, one byte per block: 1 after its CRC-32 was checked.
    _checked: dict[int, bytearray] = field(default_factory=dict, repr=False)

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return self.counts.tokens

    def read(self, start: int, stop: int) -> NDArray[np.int32]:
        """The ids at start .. stop - 1 of the stream, which may span files.

        Each call opens, reads and closes the files. No memory map stays open, so resident memory does not
        grow.

        Returns:
            (stop - start,) int32, a new array.

        Raises:
            ValueError: the range is not in the stream, a file has changed since it was written or opened, or
                an id is too high.
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
        """Tokens first .. stop - 1 of a file. Their blocks are checked on the first read."""
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
                f"{path}: expected ids below {self.vocab_size}, found {ids.max()} at token {where}; "
                f"{self.fix_hint}"
            )
        return ids

    def _load(self, path: Path, first: int, stop: int) -> NDArray[np.uint16]:
        ids = np.fromfile(path, "<u2", stop - first, offset=HEADER_BYTES + 2 * first)
        if ids.size != stop - first:
            raise ValueError(
                f"{path}: expected {stop - first} tokens from {first} on, found {ids.size}; {self.fix_hint}"
            )
        return ids

    def _check(self, path: Path, block: int, ids: NDArray[np.uint16], crc32: str) -> None:
        """Raises ValueError if the blocks from `block` on do not have the CRC-32 of the index."""
        found = block_crc32(ids.view(np.uint8).data)
        for i in range(0, len(found), CRC_DIGITS):
            number = block + i // CRC_DIGITS
            expected = crc32[number * CRC_DIGITS : (number + 1) * CRC_DIGITS]
            if found[i : i + CRC_DIGITS] != expected:
                first = number * BLOCK_TOKENS
                last = min(first + BLOCK_TOKENS, block * BLOCK_TOKENS + ids.size) - 1
                problem = (
                    f"expected CRC-32 {expected}, found {found[i : i + CRC_DIGITS]}: the file has changed"
                )
                raise ValueError(f"{path}: tokens {first} to {last}: {problem}; {self.fix_hint}")


def open_split(folder: Path, split: str, tokenizer_sha256: str, vocab_size: int) -> ShardSet:
    """Opens one split. Validates its index, and the header and size of all its files.

    Args:
        folder: data/shard.
        split: "train" or "val".
        tokenizer_sha256, vocab_size: of the tokenizer in use, which must be the one that made the shards.

    Raises:
        ValueError: a file is missing, foreign or cut off, or another tokenizer made it.
    """
    index, path = _read_index(folder), folder / INDEX
    if index["tokenizer_sha256"] != tokenizer_sha256:
        found = str(index["tokenizer_sha256"])[:12]
        raise ValueError(
            f"{path}: expected shards of tokenizer {tokenizer_sha256[:12]}, found those of {found}; "
            f"{FIX_HINT}"
        )
    if index["vocab_size"] != vocab_size:
        raise ValueError(
            f"{path}: expected a vocabulary of {vocab_size}, found {index['vocab_size']}; {FIX_HINT}"
        )
    if split not in index["splits"]:
        raise ValueError(f"{path}: expected a split {split}, found {', '.join(index['splits'])}; {FIX_HINT}")
    counts: Counts = index["splits"][split]
    hint = fix_hint(index["taken_from"])
    paths = [Path(index["taken_from"] or folder) / file.name for file in counts.files]
    sizes = [count_tokens(file, hint) for file in paths]
    for file, size, known in zip(paths, sizes, counts.files, strict=True):
        if size != known.tokens:
            raise ValueError(f"{file}: expected {known.tokens} tokens, found {size}; {hint}")
    starts = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
    return ShardSet(folder, split, vocab_size, counts, paths, starts, hint)


def _read_index(folder: Path) -> dict[str, Any]:
    """The content of index.json, with the Counts of each split."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{path}: not found: the stage shard has not finished; {FIX_HINT}")
    try:
        index = dict(json.loads(path.read_bytes()))
        valid = isinstance(index["tokenizer_sha256"], str) and isinstance(index["vocab_size"], int)
        valid = valid and isinstance(index["taken_from"], str | None)
        index["splits"] = {split: _parse_counts(row) for split, row in index["splits"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):  # ValueError: neither UTF-8 nor JSON
        valid = False
    if not valid:
        raise ValueError(
            f"{path}: expected tokenizer_sha256, vocab_size and splits as the stage shard writes them; "
            f"{FIX_HINT}"
        )
    return index


def _parse_counts(row: dict[str, Any]) -> Counts:
    """A split of index.json; ValueError or TypeError if it is not as the stage writes it."""
    counts = Counts(**{**row, "files": [ShardFile(**file) for file in row["files"]]})
    valid = all(
        type(count) is int and count >= 0 for count in (counts.tokens, counts.bytes, counts.documents)
    )
    for file in counts.files:
        valid = valid and isinstance(file.name, str) and type(file.tokens) is int
        valid = valid and len(file.crc32) == CRC_DIGITS * -(-file.tokens // BLOCK_TOKENS)
    if not valid or counts.tokens != sum(file.tokens for file in counts.files):
        raise ValueError
    return counts
