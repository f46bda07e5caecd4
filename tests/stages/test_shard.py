"""The stage shard: a separator before each document, honest counts, bounded memory, and folders that are
whole or refused.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import shard
from stages.shard_format import open_split
from stages.shard_writer import ShardWriter
from stages.text_files import RowWriter, atomic_file
from stages.tokenizer import Tokenizer

SEPARATOR = 256


class ByteTokenizer:
    """The tokenizer's interface with a token a byte."""

    vocab_size = 257
    sha256 = "ab" * 32

    def __init__(self, *special: str) -> None:
        self.special = {token: 256 + number for number, token in enumerate(special)}

    def encode_batch(self, texts: Iterable[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8).astype(np.uint32) for text in texts]


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = ByteTokenizer("<|endoftext|>")
    monkeypatch.setattr(shard, "Tokenizer", SimpleNamespace(load=lambda path: made))
    return made


def write_documents(path: Path, texts: list[str]) -> None:
    with atomic_file(path) as stream:
        writer = RowWriter(stream)
        for text in texts:
            writer.write({"text": text, "source": "test"})
        writer.finish()


def run(folder: Path, train: list[str], val: list[str], tokens_per_shard: int = 10) -> None:
    for split, texts in (("train", train), ("val", val)):
        write_documents(folder / f"{split}.jsonl.zst", texts)
    settings: Any = SimpleNamespace(
        shard=SimpleNamespace(tokens_per_shard=tokens_per_shard, pretokenized=None)
    )
    paths = {"train": folder / "train.jsonl.zst", "val": folder / "val.jsonl.zst"}
    shard.run(settings, tokenizer_path=folder / "tokenizer.json", folder=folder / "shard", **paths)


def crc32_of(ids: list[int]) -> str:
    """As index.json holds it, of ids that are less than a block."""
    return f"{zlib.crc32(np.array(ids, '<u2').tobytes()):08x}"


def test_stage_writes_what_it_says(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a lost separator, bytes counted as characters (bits per byte!), and counts that don't match the
    files.
    """
    run(tmp_path, ["Ab\u00e9", "", "\U0001f600 z"], ["val"], tokens_per_shard=6)
    split = open_split(tmp_path / "shard", "train", tokenizer.sha256, 257)
    expected = [SEPARATOR, *"Ab\u00e9".encode(), SEPARATOR, SEPARATOR, *"\U0001f600 z".encode()]
    assert split.read(0, split.tokens).tolist() == expected
    index = json.loads((tmp_path / "shard" / "index.json").read_text(encoding="utf-8"))
    assert index == {
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": 257,
        "taken_from": None,
        "splits": {
            "train": {"tokens": 13, "bytes": 10, "documents": 3, "files": [
                {"name": "train_00000.bin", "tokens": 6, "crc32": crc32_of(expected[:6])},
                {"name": "train_00001.bin", "tokens": 7, "crc32": crc32_of(expected[6:])},
            ]},
            "val": {"tokens": 4, "bytes": 3, "documents": 1, "files": [
                {"name": "val_00000.bin", "tokens": 4, "crc32": crc32_of([SEPARATOR, *b"val"])},
            ]},
        },
    }  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        "train: 3 documents, 10 bytes, 13 tokens (0.77 bytes per token), 2 shards",
        "val: 1 documents, 3 bytes, 4 tokens (0.75 bytes per token), 1 shards",
    ]


def test_real_tokenizer_gives_the_text_back(tmp_path: Path) -> None:
    """Catches, from documents to shards to text, a document merged with its neighbour, and a shard read with
    the wrong ids.
    """
    train = ["to be, or not to be\r\n", "", " that is \u2014 the <|endoftext|> question", "\0\t\U0001f600"]
    tokenizer = Tokenizer.train(train * 3, 280, ["<|pad|>", "<|endoftext|>"])
    tokenizer.save(tmp_path / "tokenizer.json")
    run(tmp_path, train, ["to be"], tokens_per_shard=7)
    split = open_split(tmp_path / "shard", "train", tokenizer.sha256, tokenizer.vocab_size)
    ids = split.read(0, split.tokens)
    starts = np.flatnonzero(ids == tokenizer.special["<|endoftext|>"])
    assert [tokenizer.decode(piece) for piece in np.split(ids, starts)[1:]] == train
    assert (
        split.counts.bytes == tokenizer.token_lengths[ids].sum() == sum(len(text.encode()) for text in train)
    )
    assert split.tokens < split.counts.bytes  # something was merged


def test_two_runs_are_equal_and_leave_nothing_of_the_first(tmp_path: Path, tokenizer: Any) -> None:
    """Catches shards of a longer earlier run that remain, and outputs that hold a time or a path."""
    run(tmp_path, ["a" * 100], ["b" * 30])
    run(tmp_path, ["a" * 29], ["b"])
    first = {path.name: path.read_bytes() for path in (tmp_path / "shard").iterdir()}
    assert sorted(first) == [
        "index.json",
        "train_00000.bin",
        "train_00001.bin",
        "train_00002.bin",
        "val_00000.bin",
    ]
    run(tmp_path, ["a" * 29], ["b"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "shard").iterdir()} == first


def test_interrupted_run_is_not_taken_for_whole(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches new shards under an old index.json, which a reader would believe."""
    run(tmp_path, ["a" * 25], ["b"])

    def fail(texts: Iterable[bytes]) -> list[np.ndarray]:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "encode_batch", fail)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, ["a" * 25], ["b"])
    with pytest.raises(
        ValueError, match=r"index\.json: not found: the stage shard has not finished; run: .*dvc repro shard"
    ):
        open_split(tmp_path / "shard", "train", tokenizer.sha256, 257)


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_split_without_text_is_refused(tmp_path: Path, tokenizer: Any, texts: list[str]) -> None:
    """Catches an empty corpus that is noticed only in training, as a division by zero."""
    with pytest.raises(
        ValueError, match=r"val\.jsonl\.zst: expected at least one document with text, found none"
    ):
        run(tmp_path, ["text"], texts)
    assert not (tmp_path / "shard" / "index.json").exists()


def test_tokenizer_without_separator_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    """Catches a KeyError with a borrowed tokenizer."""
    tokenizer.special.clear()
    with pytest.raises(ValueError, match=r"train_bpe\.special_tokens: expected <\|endoftext\|>"):
        run(tmp_path, ["text"], ["text"])


def test_lone_surrogate_is_named() -> None:
    """Catches an error without the document's number from a JSON escape that is half a character."""
    with pytest.raises(ValueError, match="document 1: a lone surrogate at character 2"):
        list(shard.batches_of_text(["fine", "ab\ud800"], 100))


@settings(deadline=None)
@given(st.lists(st.text(max_size=6), max_size=20), st.integers(1, 30))
def test_batches_keep_order_and_size(documents: list[str], size: int) -> None:
    """Catches a document lost at a batch's border, and batches that grow beyond the bound and one
    document.
    """
    batches = list(shard.batches_of_text(iter(documents), size))
    assert [text.decode() for texts in batches for text in texts] == documents
    assert all(sum(map(len, texts[:-1])) < size for texts in batches)


def test_documents_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a stage that holds the corpus in memory: no document is read before those of earlier batches
    are written.
    """
    monkeypatch.setattr(shard, "BATCH_BYTES", 5000)
    tokenizer: Any = ByteTokenizer("<|endoftext|>")
    ahead = []
    with ShardWriter(tmp_path, "train", vocab_size=257, tokens_per_shard=7000) as writer:

        def documents() -> Iterator[str]:
            for number in range(200):
                ahead.append(number * 101 - writer.tokens)
                yield "x" * 100

        counts = shard.shard_documents(documents(), tokenizer, writer)
    assert counts.tokens == 200 * 101
    assert max(ahead) <= 5000 + 101
    assert [file.tokens for file in counts.files] == [7000, 200 * 101 - 7000]  # the end of 6200 is joined
