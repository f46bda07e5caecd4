"""The stage shard: documents -> token shards, or an index of ready-made ones.

Reads data/download's texts and the tokenizer, writes data/shard. `python -m stages.shard [overrides]`.
Documents are streamed and encoded in batches on all cores; memory is bounded by BATCH_BYTES of text and its longest document.
With `shard.pretokenized` the texts are not read: index.json then names the files of that folder.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from stages.documents import read_documents
from stages.program import stage_main
from stages.ready_shards import take_shards
from stages.settings import Settings
from stages.shard_format import Counts
from stages.shard_writer import ShardWriter, clear, write_index
from stages.special_tokens import SEPARATOR
from stages.tokenizer import Tokenizer

BATCH_BYTES = 16_000_000  # of text encoded in one call: enough to keep all cores busy, little memory


def run(
    settings: Settings,
    *,
    train: Path = Path("data/download/train.jsonl.zst"),
    val: Path = Path("data/download/val.jsonl.zst"),
    tokenizer: Path = Path("data/train_bpe/tokenizer.json"),
    folder: Path = Path("data/shard"),
) -> None:
    """Writes both splits' shards and index.json, the last of all.

    Args:
        settings: shard is used.
        train, val, tokenizer: what it reads.
        folder: what it writes.

    Raises:
        ValueError: a text, the tokenizer or a ready-made shard can't be read, or a split has no text.
    """
    words, taken = Tokenizer.load(tokenizer), settings.shard.pretokenized
    if SEPARATOR not in words.special:
        raise ValueError(
            f"train_bpe.special_tokens: expected {SEPARATOR}, which starts each document; add it"
        )
    clear(folder)
    if taken is None:
        splits = {}
        for split, source in (("train", train), ("val", val)):
            writer = ShardWriter(
                folder, split, vocab_size=words.vocab_size, tokens_per_shard=settings.shard.tokens_per_shard
            )
            splits[split] = shard_documents(read_documents(source), words, writer)
            if not splits[split].bytes:
                raise ValueError(
                    f"{source}: expected at least one document with text, found none; give the corpus more text"
                )
            report(split, splits[split])
    else:
        splits = take_shards(taken, words)
        for split, counts in splits.items():
            report(split, counts)
    write_index(folder, tokenizer_sha256=words.sha256, vocab_size=words.vocab_size, splits=splits,
                taken_from=None if taken is None else str(taken))  # fmt: skip


def report(split: str, counts: Counts) -> None:
    """Prints what a split holds."""
    print(f"{split}: {counts.documents:,} documents, {counts.bytes:,} bytes, {counts.tokens:,} tokens "
          f"({counts.bytes / counts.tokens:.2f} bytes a token), {len(counts.files):,} shards", flush=True)  # fmt: skip


def shard_documents(documents: Iterable[str], tokenizer: Tokenizer, writer: ShardWriter) -> Counts:
    """Encodes documents, each behind a separator, and writes them; returns what was written."""
    separator = np.array([tokenizer.special[SEPARATOR]])
    text_bytes = number = 0
    with writer:
        for texts in batches_of_text(documents, BATCH_BYTES):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                writer.add(separator)
                writer.add(ids)
                text_bytes += len(text)
                number += 1
    return Counts(tokens=writer.tokens, bytes=text_bytes, documents=number, files=writer.files)


def batches_of_text(documents: Iterable[str], size: int) -> Iterator[list[bytes]]:
    """Documents as UTF-8, in lists that end with the document that brings them to `size` bytes."""
    texts: list[bytes] = []
    total = 0
    for number, document in enumerate(documents):
        try:
            texts.append(document.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ValueError(
                f"document {number}: a lone surrogate at character {error.start} is not Unicode text"
            ) from None
        total += len(texts[-1])
        if total >= size:
            yield texts
            texts, total = [], 0
    if texts:
        yield texts


def main() -> None:
    """Runs the stage on params.yaml and the command line's overrides."""
    stage_main("shard", run)


if __name__ == "__main__":
    main()
