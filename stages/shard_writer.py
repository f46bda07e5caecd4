"""Writing token shards: ids are streamed into files of shard.tokens_per_shard, index.json comes last."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stages.shard_format import (
    BLOCK_TOKENS,
    HEADER_BYTES,
    INDEX,
    MAX_TOKENS,
    MAX_VOCAB,
    SPLITS,
    Counts,
    ShardFile,
    block_crc32,
    header,
    shard_path,
)
from stages.text_files import atomic_file, wrap_write_errors, write_json

MAX_SHARDS = 100_000  # five digits in the name
# llm.c aborts on a shard that is shorter than a batch. Its batches for GPT-2 have 2^19 tokens.
LAST_TOKENS = 1 << 20


def to_uint16(tokens: NDArray[np.integer[Any]], vocab_size: int) -> NDArray[np.uint16]:
    """The ids as uint16, checked before the cast, which would wrap silently.

    Raises:
        ValueError: an id is not in 0 .. vocab_size - 1, or vocab_size is above 65536.
    """
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocabulary of {vocab_size}: shards hold uint16, so expected 1 to {MAX_VOCAB}")
    if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
        raise ValueError(
            f"token ids {tokens.min()} to {tokens.max()}: expected 0 to {vocab_size - 1}, the vocabulary"
        )
    return tokens.astype("<u2")


class ShardWriter:
    """Writes a stream of ids as shards of tokens_per_shard.

    The last shard holds at least the smaller of tokens_per_shard and LAST_TOKENS, unless it is the only one. A shorter end is
    joined to the shard before, which is then longer than tokens_per_shard. So a full shard stays open until the next one has
    enough tokens. They wait in memory: at most 2 MB and the caller's piece.

    A shard gets its name when it is complete. Used as a context manager, which closes the last one.

    Attributes:
        tokens: how many were added.
        files: the shards that are complete.
    """

    def __init__(self, folder: Path, split: str, *, vocab_size: int, tokens_per_shard: int) -> None:
        most = MAX_TOKENS - LAST_TOKENS  # the last shard may be that much longer
        if not 1 <= tokens_per_shard <= most:
            raise ValueError(
                f"shard.tokens_per_shard: expected 1 to {most} (counts are int32), got {tokens_per_shard}"
            )
        self.folder, self.split = folder, split
        self.vocab_size, self.tokens_per_shard = vocab_size, tokens_per_shard
        self.tokens = 0
        self.files: list[ShardFile] = []
        self._least = min(tokens_per_shard, LAST_TOKENS)
        self._waiting = bytearray()  # ids that are not written yet
        self._open = ExitStack()  # the shard being written, if any
        self._file: BinaryIO | None = None
        self._in_shard = 0  # tokens written to it: whole blocks, but at its end
        self._crc32: list[str] = []

    def add(self, tokens: NDArray[np.integer[Any]]) -> None:
        """Appends ids (any integer dtype); ValueError where one is outside the vocabulary."""
        self._waiting += to_uint16(tokens, self.vocab_size).tobytes()
        self.tokens += tokens.size
        while self._in_shard + len(self._waiting) // 2 >= self.tokens_per_shard + self._least:
            self._write(self.tokens_per_shard - self._in_shard)
            self._end()
        here = min(len(self._waiting) // 2, self.tokens_per_shard - self._in_shard)
        self._write(here // BLOCK_TOKENS * BLOCK_TOKENS)

    def _write(self, count: int) -> None:
        """Writes the next `count` ids to the current shard."""
        if not count:
            return
        file = self._file or self._begin()
        piece = bytes(self._waiting[: 2 * count])
        del self._waiting[: 2 * count]
        file.write(piece)
        self._crc32.append(block_crc32(piece))
        self._in_shard += count

    def _begin(self) -> BinaryIO:
        if len(self.files) == MAX_SHARDS:
            raise ValueError(
                f"shard.tokens_per_shard: {self.tokens_per_shard} gives over {MAX_SHARDS} files; set it higher"
            )
        self._file = self._open.enter_context(
            atomic_file(shard_path(self.folder, self.split, len(self.files)))
        )
        self._file.write(bytes(HEADER_BYTES))  # its place; the count is known at the end
        return self._file

    def _end(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        self._file.write(header(self._in_shard))
        self._open.close()
        name = shard_path(self.folder, self.split, len(self.files)).name
        self.files.append(ShardFile(name, self._in_shard, "".join(self._crc32)))
        self._file, self._in_shard, self._crc32 = None, 0, []

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._open.__exit__(kind, error, trace)  # removes the shard that was being written
            return
        with self._open:  # likewise after an error here
            self._write(len(self._waiting) // 2)
            if self._file is not None:
                self._end()


def write_shard(path: Path, tokens: NDArray[np.integer[Any]], vocab_size: int) -> ShardFile:
    """Writes one shard, atomically.

    Args:
        path: the file.
        tokens: (number of tokens,) any integer dtype, at least one.
        vocab_size: every id must be below it.

    Returns:
        What index.json says of it.

    Raises:
        ValueError: an id is outside the vocabulary, or the vocabulary above 65536.
    """
    data = to_uint16(tokens, vocab_size).tobytes()
    with atomic_file(path) as file:
        file.write(header(tokens.size) + data)
    return ShardFile(path.name, tokens.size, block_crc32(data))


def clear(folder: Path) -> None:
    """Makes the folder and takes index.json and every earlier shard out of it, index first."""
    with wrap_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INDEX).unlink(missing_ok=True)
        for split in SPLITS:
            for path in folder.glob(f"{split}_*.bin*"):
                path.unlink()


def write_index(
    folder: Path,
    *,
    tokenizer_sha256: str,
    vocab_size: int,
    splits: Mapping[str, Counts],
    taken_from: str | None = None,
) -> None:
    """Writes index.json, atomically: the last step, which makes the folder whole.

    Args:
        folder: data/shard.
        tokenizer_sha256, vocab_size: of the tokenizer whose ids the shards hold.
        splits: what each holds.
        taken_from: the folder of ready-made shards, if they are such; None: they lie in `folder`.
    """
    index = {
        "tokenizer_sha256": tokenizer_sha256,
        "vocab_size": vocab_size,
        "taken_from": taken_from,
        "splits": {split: asdict(counts) for split, counts in splits.items()},
    }
    write_json(folder / INDEX, index)
