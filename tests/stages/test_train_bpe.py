"""The stage train_bpe: the sample it learns from, the file it writes, the line it says."""

import json
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages import train_bpe
from stages.text_files import RowWriter, atomic_file
from stages.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|end|>")


def run(folder: Path, texts: list[str], **chosen: Any) -> Path:
    """The stage over `texts`; returns the file that it writes."""
    with atomic_file(folder / "train.jsonl.zst") as stream:
        writer = RowWriter(stream)
        for text in texts:
            writer.write({"text": text, "source": "test"})
        writer.finish()
    section = {
        "vocab_size": 270,
        "sample_bytes": 10_000,
        "pattern": "gpt2",
        "special_tokens": SPECIAL,
        "pretrained": None,
        **chosen,
    }
    settings: Any = SimpleNamespace(train_bpe=SimpleNamespace(**section), runtime=SimpleNamespace(threads=0))
    train_bpe.run(
        settings, train=folder / "train.jsonl.zst", tokenizer_path=folder / "out" / "tokenizer.json"
    )
    return folder / "out" / "tokenizer.json"


# A stage that writes something else than it says, or leaves a partial file behind.
def test_stage_learns_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["the other theme", "of the mother", "caf\u00e9"]
    path = run(tmp_path, texts)
    tokenizer = Tokenizer.load(path)
    assert tokenizer.sha256 == Tokenizer.train(texts, 270, SPECIAL).sha256
    assert [entry.name for entry in path.parent.iterdir()] == ["tokenizer.json"]
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    size = f"33 bytes: {tokens:,} tokens, {33 / tokens:.2f} bytes per token; "
    line = f"270 ids (2 special), merges learned from 3 documents, {size}"
    assert capsys.readouterr().out.startswith(line)


# A tokenizer trained although another was asked for.
def test_stage_takes_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Tokenizer.train(["a tale told twice"], 262, SPECIAL[:1])
    other.save(tmp_path / "other.json")
    path = run(tmp_path, ["the other"], pretrained=str(tmp_path / "other.json"))
    assert Tokenizer.load(path).special == {"<|endoftext|>": 261, "<|end|>": 262}
    assert json.loads(path.read_text(encoding="utf-8"))["model"]["merges"]
    assert "taken from" in capsys.readouterr().out


# An impossible vocabulary that leaves a file behind, which a later stage would take for the tokenizer.
def test_stage_refuses_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train_bpe.vocab_size: this text gives at most 258, got 270"):
        run(tmp_path, ["a"])
    assert not (tmp_path / "out").exists()


# A sample from the beginning alone, one beyond the bound (memory), or one that differs from run to run.
def test_sample_is_spread_and_bounded() -> None:
    documents = [f"{number:04}" for number in range(1000)]
    assert train_bpe.sample(documents, 4000) == [text.encode() for text in documents]
    assert train_bpe.sample(documents, 3999) == [text.encode() for text in documents[::2]]
    assert train_bpe.sample(documents, 100) == [text.encode() for text in documents[::64]]
    endless = (f"{number:08}" for number in count())
    assert len(train_bpe.sample(islice(endless, 100_000), 800)) in range(49, 101)


# A long document that breaks the bound, or is cut inside a character, which would teach merges of broken
# ones.
def test_long_documents_are_cut_at_a_character() -> None:
    assert train_bpe.sample(["a\u20ac\u20ac"], 6) == ["a\u20ac".encode()]
    assert train_bpe.sample(["\u20ac"], 2) == [b""]
    assert train_bpe.sample(["abcdef", "gh"], 4) == [b"abcd"]


# A lone surrogate replaced by a question mark, or an error: JSON can hold one, and UTF-8 has no bytes for it.
def test_sample_keeps_lone_surrogates() -> None:
    assert train_bpe.sample(["a\ud800b"], 10) == [b"a\xed\xa0\x80b"]
    assert train_bpe.sample(["a\ud800b"], 3) == [b"a"]
