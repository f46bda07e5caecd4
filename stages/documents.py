"""Reads the documents of data/download, for train_bpe and shard."""

from collections.abc import Iterator
from pathlib import Path

from stages.text_files import read_rows


def read_documents(path: Path) -> Iterator[str]:
    """Streams the texts of `train.jsonl.zst` or `val.jsonl.zst` in order.

    Raises:
        ValueError: the file is missing or cut off, or a line is not {"text": ..., "source": ...}.
    """
    for where, row in read_rows(path):
        if not isinstance(row.get("text"), str):
            raise ValueError(f"{where}: expected a row with the key text, got the keys {sorted(row)}; "
                             "run: .venv/bin/dvc repro download")  # fmt: skip
        yield row["text"]
