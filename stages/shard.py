"""The stage shard: documents -> token shards, or an index of ready-made ones.

Reads data/download's texts and the tokenizer, writes data/shard. `python -m stages.shard [overrides]`.
Documents are streamed and encoded in batches on all cores. Memory is bounded by BATCH_BYTES of text and the
longest document. With `shard.pretokenized` the texts are not read: index.json then names the files of that
folder.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from stages.documents import read_documents
from stages.program import stage_main
from stages.ready_shards import adopt_shards
from stages.settings import Settings
from stages.shard_format import Counts
from stages.shard_writer import ShardWriter, clear, write_index
from stages.special_tokens import SEPARATOR
from stages.tokenizer import Tokenizer

BATCH_BYTES = 16_000_000  # of text, encoded in one call: keeps all cores busy in little memory


def run(
    settings: Settings,
    *,
    train: Path = Path("data/download/train.jsonl.zst"),
    val: Path = Path("data/download/val.jsonl.zst"),
    tokenizer_path: Path = Path("data/train_bpe/tokenizer.json"),
    folder: Path = Path("data/shard"),
) -> None:
    """Writes both splits' shards, and index.json last.

    Args:
        settings: shard is used.
        train, val, tokenizer_path: input files.
        folder: output folder.

    Raises:
        ValueError: a text, the tokenizer or a ready-made shard cannot be read, or a split has no text.
    """
    tokenizer, pretokenized = Tokenizer.load(tokenizer_path), settings.shard.pretokenized
    if SEPARATOR not in tokenizer.special:
        raise ValueError(
            f"train_bpe.special_tokens: expected {SEPARATOR}, which starts each document; add it"
        )
    clear(folder)
    if pretokenized is None:
        splits = {}
        for split, source in (("train", train), ("val", val)):
            writer = ShardWriter(
                folder,
                split,
                vocab_size=tokenizer.vocab_size,
                tokens_per_shard=settings.shard.tokens_per_shard,
            )
            splits[split] = shard_documents(read_documents(source), tokenizer, writer)
            if not splits[split].bytes:
                raise ValueError(
                    f"{source}: expected at least one document with text, found none; give the corpus more "
                    "text"
                )
            report(split, splits[split])
    else:
        splits = adopt_shards(pretokenized, tokenizer)
        for split, counts in splits.items():
            report(split, counts)
    write_index(folder, tokenizer_sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size, splits=splits,
                taken_from=None if pretokenized is None else str(pretokenized))  # fmt: skip


def report(split: str, counts: Counts) -> None:
    """Prints the size of a split."""
    print(f"{split}: {counts.documents:,} documents, {counts.bytes:,} bytes, {counts.tokens:,} tokens "
          f"({counts.bytes / counts.tokens:.2f} bytes per token), {len(counts.files):,} "
          "shards", flush=True)  # fmt: skip


def shard_documents(documents: Iterable[str], tokenizer: Tokenizer, writer: ShardWriter) -> Counts:
    """Encodes documents and writes each after a separator; returns the counts."""
    separator = np.array([tokenizer.special[SEPARATOR]])
    text_bytes = num_documents = 0
    with writer:
        for texts in batches_of_text(documents, BATCH_BYTES):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                writer.add(separator)
                writer.add(ids)
                text_bytes += len(text)
                num_documents += 1
    return Counts(tokens=writer.tokens, bytes=text_bytes, documents=num_documents, files=writer.files)


def batches_of_text(documents: Iterable[str], size: int) -> Iterator[list[bytes]]:
    """Documents as UTF-8, in lists. A list ends with the document with which it reaches `size` bytes."""
    texts: list[bytes] = []
    total = 0
    for number, document in enumerate(documents):
        try:
            texts.append(document.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ValueError(
                f"document {number}: a lone surrogate at character {error.start} is not Unicode text; remove "
                "it"
            ) from None
        total += len(texts[-1])
        if total >= size:
            yield texts
            texts, total = [], 0
    if texts:
        yield texts


def main() -> None:
    """Runs the stage with params.yaml and the overrides of the command line."""
    stage_main("shard", run)


if __name__ == "__main__":
    main()
