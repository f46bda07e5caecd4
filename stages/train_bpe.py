"""The stage train_bpe: documents -> tokenizer.json.

Reads data/download's training text, writes data/train_bpe/tokenizer.json.
`python -m stages.train_bpe [overrides]`.
"""

import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from stages.documents import read_documents
from stages.program import stage_main
from stages.settings import Settings
from stages.tokenizer import Tokenizer

_MEASURED_DOCUMENTS = 1000  # at most, to measure the bytes per token of a pretrained tokenizer


def run(
    settings: Settings,
    *,
    train: Path = Path("data/download/train.jsonl.zst"),
    tokenizer_path: Path = Path("data/train_bpe/tokenizer.json"),
) -> None:
    """Learns merges from a sample of the text, or adopts a pretrained tokenizer.

    Args:
        settings: train_bpe and runtime.threads are used.
        train: input file.
        tokenizer_path: output file.

    Raises:
        ValueError: the text cannot be read or gives too few merges, or train_bpe.pretrained is no such
            tokenizer.
    """
    chosen, threads = settings.train_bpe, settings.runtime.threads
    documents = read_documents(train)
    start = time.perf_counter()
    if chosen.pretrained is None:
        texts = sample(documents, chosen.sample_bytes)
        tokenizer = Tokenizer.train(texts, chosen.vocab_size, chosen.special_tokens, threads=threads)
        origin = "merges learned from"
    else:
        texts = sample(islice(documents, _MEASURED_DOCUMENTS), chosen.sample_bytes)
        tokenizer = Tokenizer.from_pretrained(chosen.pretrained, chosen.special_tokens)
        origin = f"taken from {chosen.pretrained}, measured on"
    tokenizer.save(tokenizer_path)
    spent_s = time.perf_counter() - start
    text_bytes = sum(len(text) for text in texts)
    tokens = sum(len(ids) for ids in tokenizer.encode_batch(texts, threads=threads))
    ratio = f", {text_bytes / tokens:.2f} bytes per token" if tokens else ""  # corpus=none has no text
    print(f"{tokenizer.vocab_size:,} ids ({len(tokenizer.special)} special), {origin} {len(texts):,} "
          "documents, "
          f"{text_bytes:,} bytes: {tokens:,} tokens{ratio}; {spent_s:.1f} s", flush=True)  # fmt: skip


def sample(documents: Iterable[str], max_bytes: int) -> list[bytes]:
    """Every n-th document, from the first on. n is the smallest power of two with which they fit into
    `max_bytes`.

    So the sample spreads over the whole text and depends only on the text. It takes one pass and `max_bytes`
    of memory. A longer document is cut at `max_bytes`, between two characters.
    """
    every, total = 1, 0
    kept: list[tuple[int, bytes]] = []
    for number, document in enumerate(documents):
        if number % every:
            continue
        kept.append((number, _cut(document.encode("utf-8", "surrogatepass"), max_bytes)))
        total += len(kept[-1][1])
        while total > max_bytes:
            every *= 2
            kept = [(number, text) for number, text in kept if number % every == 0]
            total = sum(len(text) for _, text in kept)
    return [text for _, text in kept]


def _cut(text: bytes, max_bytes: int) -> bytes:
    """The whole characters within the first max_bytes."""
    if len(text) <= max_bytes:
        return text
    while max_bytes and text[max_bytes] & 0xC0 == 0x80:
        max_bytes -= 1
    return text[:max_bytes]


def main() -> None:
    """Runs the stage with params.yaml and the overrides of the command line."""
    stage_main("train_bpe", run)


if __name__ == "__main__":
    main()
