"""Ready-made shards: llm.c's files of GPT-2's tokens, read in place."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stages import ready_shards, shard, train_bpe
from stages.batches import PretrainBatches
from stages.download import write_corpus
from stages.shard_format import BLOCK_TOKENS, ShardSet, open_split
from stages.sources.corpus import Corpus, HoldoutRule
from stages.tokenizer import Tokenizer
from stages.tokenizer.file_format import BYTE_ORDER, token_text

SEPARATOR = "<|endoftext|>"
TEXTS = ["the other theme", "of the mother", "to be, or not to be", "caf\u00e9"]


def llmc_bytes(ids: list[int], magic: int = 20240520, version: int = 1) -> bytes:
    """A file of llm.c's, written here by hand."""
    return struct.pack("<3i", magic, version, len(ids)) + bytes(4 * 253) + struct.pack(f"<{len(ids)}H", *ids)


@pytest.fixture
def gpt2(tmp_path: Path) -> Tokenizer:
    """A tokenizer in GPT-2's two files, adopted by the stage train_bpe without any text."""
    learned = Tokenizer.train(TEXTS, 270, [])
    written = [token_text(token) for token in learned.token_bytes] + [SEPARATOR]
    merges = [f"{written[left]} {written[right]}" for left, right, _ in learned.merges]
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "vocab.json").write_text(
        json.dumps({text: token for token, text in enumerate(written)}), encoding="utf-8"
    )
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    write_corpus(Corpus("none", (), HoldoutRule()), tmp_path)
    section = SimpleNamespace(pretrained=folder, special_tokens=(SEPARATOR,), sample_bytes=100)
    settings: Any = SimpleNamespace(train_bpe=section, runtime=SimpleNamespace(threads=1))
    train_bpe.run(settings, train=tmp_path / "train.jsonl.zst", tokenizer_path=tmp_path / "tokenizer.json")
    return Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.fixture
def files(tmp_path: Path, gpt2: Tokenizer) -> dict[str, list[int]]:
    """The folder `fineweb` and the ids of its files: two of train, of which the second begins within a
    document.
    """
    separator, texts = gpt2.special[SEPARATOR], [gpt2.encode(text).tolist() for text in TEXTS]
    made = {
        "fineweb_train_000001.bin": [separator, *texts[0], separator, *texts[1][:3]],
        "fineweb_train_000002.bin": [*texts[1][3:], *([separator, *texts[2]] * 4000)],
        "fineweb_val_000000.bin": [separator, *texts[3]],
    }
    (tmp_path / "fineweb").mkdir()
    for name, ids in made.items():
        (tmp_path / "fineweb" / name).write_bytes(llmc_bytes(ids))
    return made


def run(folder: Path, take: Path) -> dict[str, ShardSet]:
    """The stage shard over ready-made files, and both splits opened."""
    settings: Any = SimpleNamespace(shard=SimpleNamespace(tokens_per_shard=1000, pretokenized=take))
    shard.run(
        settings,
        train=folder / "no",
        val=folder / "no",
        tokenizer_path=folder / "tokenizer.json",
        folder=folder / "shard",
    )
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    return {
        split: open_split(folder / "shard", split, tokenizer.sha256, tokenizer.vocab_size)
        for split in ("train", "val")
    }


# Files copied, taken in another order or read with another vocabulary; bytes and documents that bits per byte
# gets wrong.
@pytest.mark.parametrize("relative", [False, True])
def test_files_are_one_stream(
    tmp_path: Path,
    gpt2: Tokenizer,
    files: dict[str, list[int]],
    relative: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        ready_shards, "PIECE_TOKENS", BLOCK_TOKENS
    )  # the second file is read in more than one piece
    splits = run(tmp_path, Path("fineweb") if relative else tmp_path / "fineweb")
    assert [path.name for path in (tmp_path / "shard").iterdir()] == ["index.json"]
    ids = files["fineweb_train_000001.bin"] + files["fineweb_train_000002.bin"]
    assert len(ids) > BLOCK_TOKENS
    assert splits["train"].read(0, len(ids)).tolist() == ids
    assert splits["val"].read(0, splits["val"].tokens).tolist() == files["fineweb_val_000000.bin"]
    counts = splits["train"].counts
    text = "".join(TEXTS[:2]) + TEXTS[2] * 4000
    assert (counts.tokens, counts.bytes, counts.documents) == (len(ids), len(text), 4002)
    assert splits["val"].counts.bytes == 5
    batches = PretrainBatches(
        splits["train"], micro_batch=4, context=8, separator_id=270, document_mask=True, seed=1
    )
    batch = batches.batch(3)
    start = int(batches.window_starts(0, np.arange(12, 16))[2])
    assert batch.tokens[2].tolist() == ids[start : start + 8]


# A byte that changed since, or a folder that moved, reported as a fault of data/shard, which `dvc repro`
# could fix.
def test_changed_and_moved_files_name_shard_take(tmp_path: Path, files: dict[str, list[int]]) -> None:
    folder = tmp_path / "fineweb"
    splits = run(tmp_path, folder)
    path = folder / "fineweb_train_000002.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        ValueError,
        match=r"000002\.bin: tokens 32768 to \d+: .* put the files of shard\.pretokenized = .*fineweb back",
    ):
        splits["train"].read(splits["train"].tokens - 1, splits["train"].tokens)
    folder.rename(tmp_path / "elsewhere")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(
        ValueError,
        match=r"train_000001\.bin: not found; put the files of shard\.pretokenized = .*fineweb back, or",
    ):
        open_split(tmp_path / "shard", "train", tokenizer.sha256, tokenizer.vocab_size)


def replaced(name: str, data: bytes) -> Callable[[Path], object]:
    """Writes another file into the folder."""
    return lambda folder: (folder / name).write_bytes(data)


LATE = [1] * (BLOCK_TOKENS + 5) + [271]  # after the first piece
SPOIL: dict[str, tuple[Callable[[Path], object], str]] = {
    "id of a larger vocabulary": (
        replaced("fineweb_val_000000.bin", llmc_bytes([1, 2, 300])),
        r"val_000000\.bin: expected ids below 271, the vocabulary of train_bpe\.pretrained, found 300 at token 2; set",
    ),
    "id in a later piece": (
        replaced("fineweb_val_000000.bin", llmc_bytes(LATE)),
        r"found 271 at token 32773; set train_bpe\.pretrained",
    ),
    "cut": (
        replaced("fineweb_train_000001.bin", llmc_bytes([1, 2, 3])[:-1]),
        r"000001\.bin: expected 1030 bytes for 3 tokens",
    ),
    "too long": (
        replaced("fineweb_train_000001.bin", llmc_bytes([1]) + b"\0"),
        r"000001\.bin: expected 1026 bytes for 1 tokens",
    ),
    "llama 3's": (
        replaced("fineweb_val_000001.bin", llmc_bytes([1], 20240801, 7)),
        r"expected magic .* found 20240801: .*llm",
    ),
    "version 2": (
        replaced("fineweb_val_000001.bin", llmc_bytes([1], version=2)),
        r"000001\.bin: expected version 1 .* found 2",
    ),
    "no tokens": (
        replaced("fineweb_val_000001.bin", llmc_bytes([])),
        r"val_000001\.bin: expected at least 1 token",
    ),
    "no split": (
        lambda folder: (folder / "fineweb_val_000000.bin").unlink(),
        r"shard\.pretokenized: expected at least one file \*val\*\.bin in .*fineweb, found none",
    ),
    "both splits": (
        replaced("retrieval_train.bin", llmc_bytes([1])),
        r"retrieval_train\.bin: expected train or val in the name, found both; rename it",
    ),
    "no text": (
        replaced("fineweb_val_000000.bin", llmc_bytes([270])),
        r"expected tokens of text in its split, found only special",
    ),
}


# A file of another project or another vocabulary that is taken, or refused without its name, the place and
# what to do.
@pytest.mark.parametrize("fault", SPOIL)
def test_unfit_files_are_named(
    tmp_path: Path, files: dict[str, list[int]], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_shards, "PIECE_TOKENS", BLOCK_TOKENS)
    spoil, message = SPOIL[fault]
    spoil(tmp_path / "fineweb")
    with pytest.raises(ValueError, match=message) as caught:
        run(tmp_path, tmp_path / "fineweb")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "shard" / "index.json").exists()


# A path that names nothing, reported as a split without files.
def test_missing_folder_is_named(tmp_path: Path, gpt2: Tokenizer) -> None:
    with pytest.raises(
        ValueError, match=r"shard\.pretokenized: expected a folder of \.bin files, found none at .*nowhere"
    ):
        run(tmp_path, tmp_path / "nowhere")


# The fixture's own promise: a vocabulary that starts with the bytes, as GPT-2's does, and whose separator is
# its last id.
def test_fixture_is_like_gpt2s(gpt2: Tokenizer) -> None:
    assert gpt2.token_bytes[:256] == [bytes([byte]) for byte in BYTE_ORDER]
    assert gpt2.special == {SEPARATOR: 270}
