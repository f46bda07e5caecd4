"""Writing token shards: ids are streamed into files of shard.tokens_per_shard tokens. index.json is written
last.
"""

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
# Fewest tokens of a last shard. llm.c aborts on a shard shorter than a batch; its batches for GPT-2 have 2^19
# tokens.
MIN_LAST_SHARD_TOKENS = 1 << 20


def to_uint16(tokens: NDArray[np.integer[Any]], vocab_size: int) -> NDArray[np.uint16]:
    """The ids as uint16. They are checked first, since the cast wraps silently.

    Raises:
        ValueError: an id is not in 0 .. vocab_size - 1, or vocab_size is above 65536.
    """
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocabulary of {vocab_size}: expected 1 to {MAX_VOCAB} ids (shards hold uint16)")
    if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
        raise ValueError(
            f"token ids {tokens.min()} to {tokens.max()}: expected 0 to {vocab_size - 1}, the vocabulary"
        )
    return tokens.astype("<u2")


class ShardWriter:
    """Writes a stream of ids as shards of tokens_per_shard tokens. A context manager, whose exit closes the
    last shard.

    The last shard holds at least the smaller of tokens_per_shard and MIN_LAST_SHARD_TOKENS, unless it is
    the only one. A shorter rest is appended to the shard before, which then exceeds tokens_per_shard. A
    full shard therefore stays open until the next one has enough tokens. Those wait in memory: at most 2
    MB and the caller's piece.

    A shard appears under its name when it is complete.

    Attributes:
        tokens: number of tokens added.
        files: the complete shards.
    """

    def __init__(self, folder: Path, split: str, *, vocab_size: int, tokens_per_shard: int) -> None:
        max_tokens = (
            MAX_TOKENS - MIN_LAST_SHARD_TOKENS
        )  # the last shard may exceed tokens_per_shard by MIN_LAST_SHARD_TOKENS
        if not 1 <= tokens_per_shard <= max_tokens:
            raise ValueError(
                f"shard.tokens_per_shard: expected 1 to {max_tokens} (counts are int32), got "
                f"{tokens_per_shard}"
            )
        self.folder, self.split = folder, split
        self.vocab_size, self.tokens_per_shard = vocab_size, tokens_per_shard
        self.tokens = 0
        self.files: list[ShardFile] = []
        self._min_tokens = min(tokens_per_shard, MIN_LAST_SHARD_TOKENS)
        self._waiting = bytearray()  # bytes of ids that are not written yet
        self._open = ExitStack()  # the shard being written, if any
        self._file: BinaryIO | None = None
        self._in_shard = (
            0  # tokens written to the open shard: a multiple of BLOCK_TOKENS, except after its last write
        )
        self._crc32: list[str] = []

    def add(self, tokens: NDArray[np.integer[Any]]) -> None:
        """Appends ids (any integer dtype); ValueError if one is outside the vocabulary."""
        self._waiting += to_uint16(tokens, self.vocab_size).tobytes()
        self.tokens += tokens.size
        while self._in_shard + len(self._waiting) // 2 >= self.tokens_per_shard + self._min_tokens:
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
                f"shard.tokens_per_shard: {self.tokens_per_shard} gives over {MAX_SHARDS} files; set it "
                "higher"
            )
        self._file = self._open.enter_context(
            atomic_file(shard_path(self.folder, self.split, len(self.files)))
        )
        self._file.write(bytes(HEADER_BYTES))  # placeholder: the count is known at the end
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
            self._open.__exit__(kind, error, trace)  # removes the incomplete shard
            return
        with self._open:  # removes the incomplete shard after an error here too
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
        Its entry in index.json.

    Raises:
        ValueError: an id is outside the vocabulary, or vocab_size is above 65536.
    """
    data = to_uint16(tokens, vocab_size).tobytes()
    with atomic_file(path) as file:
        file.write(header(tokens.size) + data)
    return ShardFile(path.name, tokens.size, block_crc32(data))


def clear(folder: Path) -> None:
    """Makes the folder, and removes index.json and then every earlier shard from it."""
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
    """Writes index.json atomically. This last step marks the folder as complete.

    Args:
        folder: data/shard.
        tokenizer_sha256, vocab_size: of the tokenizer that made the ids.
        splits: the counts of each split.
        taken_from: the folder of ready-made shards; None: the shards are in `folder`.
    """
    index = {
        "tokenizer_sha256": tokenizer_sha256,
        "vocab_size": vocab_size,
        "taken_from": taken_from,
        "splits": {split: asdict(counts) for split, counts in splits.items()},
    }
    write_json(folder / INDEX, index)
