"""The token shards of a corpus: write, read, validate.

A split is the files `{split}_{00000}.bin`, `{split}_{00001}.bin`, ... in llm.c's layout:

    256 x int32, little-endian: 20240520, 1, number of tokens, zeros      then uint16, little-endian, one a token

`index.json` beside them says which tokenizer made them and what they hold. It is removed before the first shard is written
and comes back last, so a folder that has one is whole.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stages.text_files import atomic_file, write_json, writing

SPLITS = ("train", "val")
INDEX = "index.json"
SEPARATOR = "<|endoftext|>"  # the special token that starts each document
MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
MAX_VOCAB = 65536  # ids are uint16
MAX_TOKENS = 2**31 - 1  # the count is int32
MAX_SHARDS = 100_000  # five digits in the name
MEND = "run: .venv/bin/dvc repro shard"


@dataclass(frozen=True)
class Counts:
    """What one split holds.

    Args:
        tokens: ids, separators included.
        bytes: UTF-8 bytes of the documents' text, what bits per byte divides by.
        documents: as many as separators.
        shards: files.
    """

    tokens: int
    bytes: int
    documents: int
    shards: int


def shard_path(folder: Path, split: str, number: int) -> Path:
    """Path of one shard of a split."""
    return folder / f"{split}_{number:05d}.bin"


def to_uint16(tokens: NDArray[np.integer[Any]], vocab_size: int) -> NDArray[np.uint16]:
    """The ids as uint16, checked before the cast, which would wrap silently.

    Raises:
        ValueError: an id is not in 0 .. vocab_size - 1, or vocab_size is above 65536.
    """
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocabulary of {vocab_size}: shards hold uint16, so expected 1 to {MAX_VOCAB}")
    if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
        raise ValueError(f"token ids {tokens.min()} to {tokens.max()}: expected 0 to {vocab_size - 1}, the vocabulary")
    return tokens.astype("<u2")


class ShardWriter:
    """Writes a stream of ids as shards of tokens_per_shard, the last one shorter; memory is the caller's pieces alone.

    A shard gets its name when it is complete. Used as a context manager, which closes the last one.
    """

    def __init__(self, folder: Path, split: str, *, vocab_size: int, tokens_per_shard: int) -> None:
        if not 1 <= tokens_per_shard <= MAX_TOKENS:
            raise ValueError(f"shard.tokens_per_shard: expected 1 to {MAX_TOKENS} (int32), got {tokens_per_shard}")
        self.folder, self.split = folder, split
        self.vocab_size, self.tokens_per_shard = vocab_size, tokens_per_shard
        self.tokens = 0
        self.shards = 0  # those begun
        self._files = ExitStack()  # the shard being written, if any
        self._file: BinaryIO | None = None
        self._in_shard = 0

    def add(self, tokens: NDArray[np.integer[Any]]) -> None:
        """Appends ids (any integer dtype); ValueError where one is outside the vocabulary."""
        rest = to_uint16(tokens, self.vocab_size)
        while rest.size:
            file = self._file or self._begin()
            piece, rest = np.split(rest, [self.tokens_per_shard - self._in_shard])
            file.write(piece.tobytes())
            self._in_shard += piece.size
            self.tokens += piece.size
            if self._in_shard == self.tokens_per_shard:
                self._end()

    def _begin(self) -> BinaryIO:
        if self.shards == MAX_SHARDS:
            raise ValueError(f"shard.tokens_per_shard: {self.tokens_per_shard} gives over {MAX_SHARDS} files; set it higher")
        self._file = self._files.enter_context(atomic_file(shard_path(self.folder, self.split, self.shards)))
        self._file.write(bytes(HEADER_BYTES))  # its place; the count is known at the end
        self.shards += 1
        self._in_shard = 0
        return self._file

    def _end(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        self._file.write(_header(self._in_shard))
        self._file = None
        self._files.close()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and self._file is not None:
            self._end()
        self._files.__exit__(kind, error, trace)  # after an error, removes the shard that was being written


def write_shard(path: Path, tokens: NDArray[np.integer[Any]], vocab_size: int) -> None:
    """Writes one shard, atomically.

    Args:
        path: the file.
        tokens: (number of tokens,) any integer dtype, at least one.
        vocab_size: every id must be below it.

    Raises:
        ValueError: an id is outside the vocabulary, or the vocabulary above 65536.
    """
    data = to_uint16(tokens, vocab_size)
    with atomic_file(path) as file:
        file.write(_header(data.size) + data.tobytes())


def read_shard(path: Path) -> "np.memmap[Any, np.dtype[np.uint16]]":
    """One shard's ids as a read-only map of the file; ValueError where the file is not a whole shard."""
    tokens = _count_tokens(path)
    return np.memmap(path, "<u2", "r", HEADER_BYTES, (tokens,))


def clear(folder: Path) -> None:
    """Makes the folder and takes index.json and every earlier shard out of it, index first."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INDEX).unlink(missing_ok=True)
        for split in SPLITS:
            for path in folder.glob(f"{split}_*.bin*"):
                path.unlink()


def write_index(folder: Path, *, tokenizer_sha256: str, vocab_size: int, splits: dict[str, Counts]) -> None:
    """Writes index.json, atomically: the last step, which makes the folder whole."""
    index = {
        "tokenizer_sha256": tokenizer_sha256,
        "vocab_size": vocab_size,
        "splits": {split: asdict(counts) for split, counts in splits.items()},
    }
    write_json(folder / INDEX, index)


@dataclass(frozen=True)
class ShardSet:
    """One split as one stream of ids, whatever files it lies in. `open_split` makes it.

    Args:
        folder: where the shards are.
        split: "train" or "val".
        vocab_size: every id read is checked to be below it.
        counts: what index.json says, checked against the files' headers.
        starts: position in the stream of each shard's first token, and the stream's length at the end.
    """

    folder: Path
    split: str
    vocab_size: int
    counts: Counts
    starts: Sequence[int]

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
            ValueError: the range is not in the stream, a file has changed since it was opened, or an id is too high.
        """
        if not 0 <= start < stop <= self.tokens:
            raise ValueError(f"{self.folder}, split {self.split}: no tokens {start} to {stop} among its {self.tokens}")
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        pieces = []
        while start < stop:
            end = min(stop, self.starts[number + 1])
            pieces.append(self._read_file(number, start - self.starts[number], end - start))
            start, number = end, number + 1
        return np.concatenate(pieces, dtype=np.int32)

    def _read_file(self, number: int, first: int, count: int) -> NDArray[np.uint16]:
        path = shard_path(self.folder, self.split, number)
        ids = np.fromfile(path, "<u2", count, offset=HEADER_BYTES + 2 * first)
        if ids.size != count:
            raise ValueError(f"{path}: expected {count} tokens from {first} on, found {ids.size}; {MEND}")
        if int(ids.max()) >= self.vocab_size:
            where = first + int(ids.argmax())
            raise ValueError(f"{path}: expected ids below {self.vocab_size}, found {ids.max()} at token {where}; {MEND}")
        return ids


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
        raise ValueError(f"{path}: expected shards of tokenizer {tokenizer_sha256[:12]}, found those of {found}; {MEND}")
    if index["vocab_size"] != vocab_size:
        raise ValueError(f"{path}: expected a vocabulary of {vocab_size}, found {index['vocab_size']}; {MEND}")
    if split not in index["splits"]:
        raise ValueError(f"{path}: expected a split {split}, found {', '.join(index['splits'])}; {MEND}")
    counts = Counts(**index["splits"][split])
    sizes = [_count_tokens(shard_path(folder, split, number)) for number in range(counts.shards)]
    if sum(sizes) != counts.tokens:
        raise ValueError(f"{path}: expected {counts.tokens} tokens in split {split}, found {sum(sizes)} in its files; {MEND}")
    starts = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
    return ShardSet(folder, split, vocab_size, counts, starts)


def _header(tokens: int) -> bytes:
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = MAGIC, VERSION, tokens
    return header.tobytes()


def _count_tokens(path: Path) -> int:
    """The number of tokens in a shard, its header and size validated."""
    if not path.is_file():
        raise ValueError(f"{path}: not found; {MEND}")
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise ValueError(f"{path}: expected a header of {HEADER_BYTES} bytes, found a file of {size}; {MEND}")
    magic, version, tokens = np.fromfile(path, "<i4", 3).tolist()
    if magic != MAGIC:
        raise ValueError(f"{path}: expected magic number {MAGIC}, found {magic}: no token shard; {MEND}")
    if version != VERSION:
        raise ValueError(f"{path}: expected version {VERSION} (uint16 tokens), found {version}; {MEND}")
    if tokens < 1:
        raise ValueError(f"{path}: expected at least 1 token, found a count of {tokens}; {MEND}")
    if size != HEADER_BYTES + 2 * tokens:
        raise ValueError(f"{path}: expected {HEADER_BYTES + 2 * tokens} bytes for {tokens} tokens, found {size}; {MEND}")
    return int(tokens)


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{path}: not found: the stage shard has not finished; {MEND}")
    try:
        index = json.loads(path.read_bytes())
        names = {field.name for field in fields(Counts)}
        whole = isinstance(index["tokenizer_sha256"], str) and isinstance(index["vocab_size"], int)
        for counts in index["splits"].values():
            whole = whole and set(counts) == names and all(type(n) is int and n >= 0 for n in counts.values())
    except (ValueError, KeyError, TypeError, AttributeError):  # ValueError: neither UTF-8 nor JSON
        whole = False
    if not whole:
        raise ValueError(f"{path}: expected tokenizer_sha256, vocab_size and splits as the stage shard writes them; {MEND}")
    return dict(index)
