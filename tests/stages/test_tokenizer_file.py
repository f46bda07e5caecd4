"""tokenizer.json and GPT-2's two files: what is read, and what is refused with which words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|pad|>")
TEXT = "the theme of the other, the \u00e9t\u00e9 "
Change = Callable[[dict[str, Any]], object]


def content(tmp_path: Path) -> dict[str, Any]:
    """A tokenizer.json of 266 ids: 256 bytes, 8 merges, 2 special tokens."""
    Tokenizer.train([TEXT], 266, SPECIAL).save(tmp_path / "tokenizer.json")
    return json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))


def written(tmp_path: Path, changed: object) -> Path:
    """The file with other content."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(changed, ensure_ascii=False), encoding="utf-8", newline="\n")
    return path


# A broken or foreign file taken as it is gives wrong ids much later, or a traceback that names neither file nor key.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("model"), "expected model to be an object, got nothing"),
        (lambda c: c["model"].pop("vocab"), "expected vocab to be an object, got nothing"),
        (lambda c: c["model"].update(merges={}), r"expected merges to be a list, got \{\}"),
        (lambda c: c["model"].update(type="Unigram"), "expected model.type BPE, got 'Unigram'"),
        (lambda c: c["model"].update(ignore_merges=True), "expected model.ignore_merges false, got true"),
        (lambda c: c["model"].update(dropout=0.1), "expected model.dropout 0, got 0.1"),
        (lambda c: c.update(normalizer={"type": "NFC"}), r'expected normalizer null, got \{"type": "NFC"\}'),
        (lambda c: c["pre_tokenizer"].update(add_prefix_space=True), 'expected pre_tokenizer .*, got .*"add_prefix_space": true'),
        (lambda c: c["pre_tokenizer"].update(use_regex=False), 'expected pre_tokenizer .*, got .*"use_regex": false'),
        (lambda c: c["model"]["vocab"].update(a="7"), "expected an id from 0 for the token 'a', got \"7\""),
        (lambda c: c["model"]["vocab"].update(a=True), "expected an id from 0 for the token 'a', got true"),
        (lambda c: c["model"]["vocab"].update(a=70), "the tokens 'a' and 'g' have the same id 70"),
        (lambda c: c["model"]["vocab"].update(a=900), "expected ids 0 to 265 for 266 tokens, found none with 64"),
        (lambda c: c["model"]["vocab"].update({"a b": 266}), r"byte characters, got 'a b' \(id 266\)"),
        (lambda c: c["added_tokens"].append({"id": 64, "content": "a"}), r"none for byte 97 \('a'\)"),
        (lambda c: c["added_tokens"].append({"content": "a"}), r"expected added_tokens\[2\] with content and id"),
        (lambda c: c["added_tokens"][0].update(id=265), "'<|endoftext|>' has the id 265, but 264 in the vocabulary"),
        (lambda c: c["model"]["merges"].append("x y z"), 'expected merge 8 to be two tokens, got "x y z"'),
        (lambda c: c["model"]["merges"].append(["x", 3]), r'expected merge 8 to be two tokens, got \["x", 3\]'),
        (lambda c: c["model"]["merges"].append("x qq"), r"merge 8 \('x', 'qq'\): 'qq' is not in the vocabulary"),
        (lambda c: c["model"]["merges"].append("x y"), r"merge 8 \('x', 'y'\): 'xy' is not in the vocabulary"),
        (lambda c: c["model"]["merges"].append(c["model"]["merges"][0]), r"merge 8 \(.*\) is there twice"),
    ],
)
def test_load_says_what_is_wrong(tmp_path: Path, change: Change, message: str) -> None:
    changed = content(tmp_path)
    change(changed)
    path = written(tmp_path, changed)
    with pytest.raises(ValueError, match=message.replace("<|", r"<\|").replace("|>", r"\|>")) as error:
        Tokenizer.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert str(error.value).endswith("; make it anew: .venv/bin/dvc repro train_bpe")
    assert "\n" not in str(error.value)


# A missing, truncated or binary file reported as anything but that.
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "no such file"),
        (b"", "expected JSON in UTF-8, got a damaged file"),
        (b'{"model": {', "expected JSON in UTF-8, got a damaged file"),
        (b"\xff\xfe", "expected JSON in UTF-8, got a damaged file"),
        (b"[1]", r"expected a JSON object, got \[1\]"),
    ],
)
def test_load_refuses_what_is_no_json_object(tmp_path: Path, data: bytes | None, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(path)


# Merges written as lists, as newer libraries do, or ids in another order (special tokens first), are equally valid.
def test_other_forms_are_read(tmp_path: Path) -> None:
    ours = Tokenizer.train([TEXT], 266, SPECIAL)
    changed = content(tmp_path)
    changed["model"]["merges"] = [merge.split(" ") for merge in changed["model"]["merges"]]
    assert Tokenizer.load(written(tmp_path, changed)).sha256 == ours.sha256
    changed["model"]["vocab"] = {text: (token + 2) % 266 for text, token in changed["model"]["vocab"].items()}
    for row in changed["added_tokens"]:
        row["id"] = (row["id"] + 2) % 266
    moved = Tokenizer.load(written(tmp_path, changed))
    assert moved.special == {"<|endoftext|>": 0, "<|pad|>": 1}
    assert moved.encode(TEXT).tolist() == [token + 2 for token in ours.encode(TEXT).tolist()]


# GPT-2's separator moved or doubled, the template's tokens missing, either pair of file names unknown.
@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_take_gpt2s_files(tmp_path: Path, names: tuple[str, str]) -> None:
    ours = Tokenizer.train([TEXT], 265, SPECIAL[:1])
    ours.save(tmp_path / "tokenizer.json")
    model = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / names[0]).write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = "\n".join(["#version: 0.2", *model["merges"], ""])
    (tmp_path / names[1]).write_text(lines, encoding="utf-8", newline="\n")
    taken = Tokenizer.take(tmp_path, ["<|user|>", "<|endoftext|>"])
    assert taken.special == {"<|endoftext|>": 264, "<|user|>": 265}
    assert taken.vocab_size == 266
    assert taken.encode(TEXT + "<|endoftext|>").tolist() == ours.encode(TEXT + "<|endoftext|>").tolist()
    (tmp_path / names[1]).unlink()
    with pytest.raises(ValueError, match=r"expected merges.txt or vocab.bpe in it, found neither"):
        Tokenizer.take(tmp_path, SPECIAL)


# Special tokens of a taken tokenizer.json renumbered, or those that it lacks forgotten.
def test_take_a_tokenizer_json(tmp_path: Path) -> None:
    content(tmp_path)
    taken = Tokenizer.take(tmp_path / "tokenizer.json", ["<|end|>", "<|pad|>"])
    assert taken.special == {"<|endoftext|>": 264, "<|pad|>": 265, "<|end|>": 266}
    with pytest.raises(ValueError, match=r"tokenizer.json: merge 1 \('t', 'he'\): 'the' is a special token"):
        Tokenizer.take(tmp_path / "tokenizer.json", ["the"])
