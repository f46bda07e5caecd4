"""The stage train_bpe: documents -> tokenizer.json.

Reads data/download's training text, writes data/train_bpe/tokenizer.json. `python -m stages.train_bpe [overrides]`.
"""

import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from stages.documents import read_documents
from stages.program import stage_main
from stages.settings import Settings
from stages.tokenizer import Tokenizer

_MEASURED_DOCUMENTS = 1000  # of those that a tokenizer taken from elsewhere is measured on


def run(
    settings: Settings,
    *,
    train: Path = Path("data/download/train.jsonl.zst"),
    tokenizer: Path = Path("data/train_bpe/tokenizer.json"),
) -> None:
    """Learns merges from a sample of the text, or takes a tokenizer made elsewhere.

    Args:
        settings: train_bpe and runtime.threads are used.
        train: what it reads.
        tokenizer: what it writes.

    Raises:
        ValueError: the text can't be read, gives too few merges, or the tokenizer to take is not one.
    """
    chosen, threads = settings.train_bpe, settings.runtime.threads
    documents = read_documents(train)
    start = time.perf_counter()
    if chosen.pretrained is None:
        texts = sample(documents, chosen.sample_bytes)
        trained = Tokenizer.train(texts, chosen.vocab_size, chosen.special_tokens, threads=threads)
    else:
        texts = sample(islice(documents, _MEASURED_DOCUMENTS), chosen.sample_bytes)
        trained = Tokenizer.from_pretrained(chosen.pretrained, chosen.special_tokens)
    trained.save(tokenizer)
    spent_s = time.perf_counter() - start
    text_bytes = sum(len(text) for text in texts)
    tokens = sum(len(ids) for ids in trained.encode_batch(texts, threads=threads))
    made = (
        "merges learned from" if chosen.pretrained is None else f"taken from {chosen.pretrained}, measured on"
    )
    bytes_a_token = (
        f", {text_bytes / tokens:.2f} bytes a token" if tokens else ""
    )  # of no text with corpus=none
    print(f"{trained.vocab_size:,} ids ({len(trained.special)} special), {made} {len(texts):,} documents, {text_bytes:,} bytes: "
          f"{tokens:,} tokens{bytes_a_token}; {spent_s:.1f} s", flush=True)  # fmt: skip


def sample(documents: Iterable[str], most_bytes: int) -> list[bytes]:
    """Every n-th document from the first on, n the smallest power of two with which they fit into `most_bytes`.

    So the sample is spread over the whole text, depends on nothing else, and needs one pass and this much memory. A document
    longer than `most_bytes` is cut there, at a whole character.
    """
    every, total = 1, 0
    kept: list[tuple[int, bytes]] = []
    for number, document in enumerate(documents):
        if number % every:
            continue
        kept.append((number, _cut(document.encode("utf-8", "surrogatepass"), most_bytes)))
        total += len(kept[-1][1])
        while total > most_bytes:
            every *= 2
            kept = [(number, text) for number, text in kept if number % every == 0]
            total = sum(len(text) for _, text in kept)
    return [text for _, text in kept]


def _cut(text: bytes, most_bytes: int) -> bytes:
    """The characters that lie whole within the first most_bytes."""
    if len(text) <= most_bytes:
        return text
    while most_bytes and text[most_bytes] & 0xC0 == 0x80:
        most_bytes -= 1
    return text[:most_bytes]


def main() -> None:
    """Runs the stage on params.yaml and the command line's overrides."""
    stage_main("train_bpe", run)


if __name__ == "__main__":
    main()
