"""The documents that download wrote, as train_bpe and shard read them."""

from collections.abc import Iterator
from pathlib import Path

from stages.text_files import read_rows


def read_documents(path: Path) -> Iterator[str]:
    """Texts of `train.jsonl.zst` or `val.jsonl.zst` in order, streaming.

    Raises:
        ValueError: the file is missing or cut off, or a line isn't {"text": ..., "source": ...}; file and line are named.
    """
    for where, row in read_rows(path):
        if not isinstance(row.get("text"), str):
            raise ValueError(f"{where}: expected a row with the key text, got the keys {sorted(row)}")
        yield row["text"]
