"""Ready-made token shards (`shard.pretokenized`): llm.c's .bin files, checked and read in place.

A folder holds `*train*.bin` and `*val*.bin` files, such as FineWeb in GPT-2's vocabulary. They are read in
sorted order. One pass over the data makes the same counts as for our own shards, and the CRC-32 of each
block.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stages.shard_format import (
    BLOCK_TOKENS,
    HEADER_BYTES,
    SPLITS,
    Counts,
    ShardFile,
    block_crc32,
    count_tokens,
)
from stages.special_tokens import SEPARATOR
from stages.tokenizer import Tokenizer

FIX_HINT = "shard.pretokenized needs llm.c's files of uint16 tokens"
PIECE_TOKENS = 128 * BLOCK_TOKENS  # read at a time: 8 MB, and 32 MB for counting


def adopt_shards(folder: Path, tokenizer: Tokenizer) -> dict[str, Counts]:
    """Read and check the files of a folder; returns the counts of each split.

    Args:
        folder: the value of shard.pretokenized.
        tokenizer: the one that made the files. Every id must be below its vocabulary size. A separator counts
            as a document.

    Raises:
        ValueError: a split has no file, a file is not llm.c's or is cut off, or an id is too high.
    """
    if not folder.is_dir():
        raise ValueError(
            f"shard.pretokenized: expected a folder of .bin files, found none at {folder}; set its path"
        )
    paths = {split: sorted(folder.glob(f"*{split}*.bin")) for split in SPLITS}
    for split, found in paths.items():
        if not found:
            raise ValueError(
                f"shard.pretokenized: expected at least one file *{split}*.bin in {folder}, found none; "
                "rename its files, or set another folder"
            )
    both = sorted(set(paths["train"]) & set(paths["val"]))
    if both:
        raise ValueError(f"{both[0]}: expected train or val in the name, found both; rename it")
    for found in paths.values():
        for path in found:
            count_tokens(path, FIX_HINT)  # check all headers before the first long read
    return {split: _count_split(found, tokenizer) for split, found in paths.items()}


def _count_split(paths: list[Path], tokenizer: Tokenizer) -> Counts:
    files = []
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for path in paths:
        file, found = _count_file(path, tokenizer.vocab_size)
        files.append(file)
        counts += found
    text_bytes = int(counts @ tokenizer.token_lengths)
    if not text_bytes:
        raise ValueError(
            f"{paths[0]}: expected tokens of text in its split, found only special tokens; replace the file"
        )
    return Counts(
        sum(file.tokens for file in files), text_bytes, int(counts[tokenizer.special[SEPARATOR]]), files
    )


def _count_file(path: Path, vocab_size: int) -> tuple[ShardFile, NDArray[np.int64]]:
    """A file's entry in index.json, and how often each id occurs in the file."""
    tokens = count_tokens(path, FIX_HINT)
    counts, crc32 = np.zeros(vocab_size, np.int64), []
    for first in range(0, tokens, PIECE_TOKENS):
        ids = np.fromfile(path, "<u2", min(PIECE_TOKENS, tokens - first), offset=HEADER_BYTES + 2 * first)
        if int(ids.max()) >= vocab_size:
            where = int((ids >= vocab_size).argmax())
            expected = f"expected ids below {vocab_size}, the vocabulary of train_bpe.pretrained"
            hint = "set train_bpe.pretrained to the tokenizer that made the file"
            raise ValueError(f"{path}: {expected}, found {ids[where]} at token {first + where}; {hint}")
        counts += np.bincount(ids, minlength=vocab_size)
        crc32.append(block_crc32(ids.view(np.uint8).data))
    return ShardFile(path.name, tokens, "".join(crc32)), counts
