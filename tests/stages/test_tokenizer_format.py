"""tokenizer.json and GPT-2's two files: what is read, and the error messages of what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|pad|>")
TEXT = "the theme of the other, the \u00e9t\u00e9 "
Change = Callable[[dict[str, Any]], object]
# <|endoftext|> in front, as an export of the base model has it.
BOS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [264], "tokens": ["<|endoftext|>"]}},
}


def content(tmp_path: Path) -> dict[str, Any]:
    """A tokenizer.json of 266 ids: 256 bytes, 8 merges, 2 special tokens."""
    Tokenizer.train([TEXT], 266, SPECIAL).save(tmp_path / "tokenizer.json")
    return json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))


def written(tmp_path: Path, changed: object) -> Path:
    """The file with other content."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(changed, ensure_ascii=False), encoding="utf-8", newline="\n")
    return path


# A broken or foreign file taken as it is gives wrong ids much later, or a traceback that names neither file
# nor key.
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
        (
            lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
            'expected pre_tokenizer .*, got .*"add_prefix_space": true',
        ),
        (
            lambda c: c["pre_tokenizer"].update(use_regex=False),
            'expected pre_tokenizer .*, got .*"use_regex": false',
        ),
        (lambda c: c["model"]["vocab"].update(a="7"), "expected an id from 0 for the token 'a', got \"7\""),
        (lambda c: c["model"]["vocab"].update(a=True), "expected an id from 0 for the token 'a', got true"),
        (lambda c: c["model"]["vocab"].update(a=70), "the tokens 'a' and 'g' have the same id 70"),
        (
            lambda c: c["model"]["vocab"].update(a=900),
            "expected ids 0 to 265 for 266 tokens, found none with 64",
        ),
        (lambda c: c["model"]["vocab"].update({"a b": 266}), r"byte characters, got 'a b' \(id 266\)"),
        (
            lambda c: c["added_tokens"].append({"id": 64, "content": "a", "special": True}),
            r"none for byte 97 \('a'\)",
        ),
        (
            lambda c: c["added_tokens"][1].update(special=False),
            r"special true for the added token '<|pad|>' \(id 265\), got false: .*; set it to true if no text may give it",
        ),
        (
            lambda c: c["added_tokens"][1].pop("special"),
            r"for the added token '<|pad|>' \(id 265\), got nothing",
        ),
        (
            lambda c: c["added_tokens"].append({"id": 266, "content": "<|pad|>", "special": True}),
            "the added token '<|pad|>' has two ids, 265 and 266",
        ),
        (
            lambda c: c["added_tokens"].append({"content": "a"}),
            r"expected added_tokens\[2\] with content and id",
        ),
        (
            lambda c: c["added_tokens"][0].update(id=265),
            "'<|endoftext|>' has the id 265, but 264 in the vocabulary",
        ),
        (lambda c: c["model"]["merges"].append("x y z"), 'expected merge 8 to be two tokens, got "x y z"'),
        (
            lambda c: c["model"]["merges"].append(["x", 3]),
            r'expected merge 8 to be two tokens, got \["x", 3\]',
        ),
        (
            lambda c: c["model"]["merges"].append("x qq"),
            r"merge 8 \('x', 'qq'\): 'qq' is not in the vocabulary",
        ),
        (
            lambda c: c["model"]["merges"].append("x y"),
            r"merge 8 \('x', 'y'\): 'xy' is not in the vocabulary",
        ),
        (lambda c: c["model"]["merges"].append(c["model"]["merges"][0]), r"merge 8 \(.*\) occurs twice"),
    ],
)
def test_load_says_what_is_wrong(tmp_path: Path, change: Change, message: str) -> None:
    changed = content(tmp_path)
    change(changed)
    path = written(tmp_path, changed)
    with pytest.raises(ValueError, match=message.replace("<|", r"<\|").replace("|>", r"\|>")) as error:
        Tokenizer.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert str(error.value).endswith("; run: .venv/bin/dvc repro train_bpe")
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


# Merges written as lists, as newer libraries do, or ids in another order (special tokens first), are equally
# valid.
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
    ours.save(tmp_path / "ours.json")
    model = json.loads((tmp_path / "ours.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / names[0]).write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = "\n".join(["#version: 0.2", *model["merges"], ""])
    (tmp_path / names[1]).write_text(lines, encoding="utf-8", newline="\n")
    taken = Tokenizer.from_pretrained(tmp_path, ["<|user|>", "<|endoftext|>"])
    assert taken.special == {"<|endoftext|>": 264, "<|user|>": 265}
    assert taken.vocab_size == 266
    assert taken.encode(TEXT + "<|endoftext|>").tolist() == ours.encode(TEXT + "<|endoftext|>").tolist()
    (tmp_path / "tokenizer.json").write_text("GPT-2's files are preferred", encoding="utf-8")
    assert Tokenizer.from_pretrained(tmp_path, ["<|user|>", "<|endoftext|>"]).sha256 == taken.sha256


# A folder that is refused although it has a tokenizer.json, as our exports do; a message that leaves out what
# may be there.
def test_take_a_folder(tmp_path: Path) -> None:
    content(tmp_path)
    ours = Tokenizer.load(tmp_path / "tokenizer.json")
    assert Tokenizer.from_pretrained(tmp_path, SPECIAL).sha256 == ours.sha256
    (tmp_path / "vocab.json").write_text("no use without merges.txt", encoding="utf-8")
    assert Tokenizer.from_pretrained(tmp_path, SPECIAL).sha256 == ours.sha256
    (tmp_path / "tokenizer.json").unlink()
    expected = r"expected vocab.json and merges.txt \(or encoder.json and vocab.bpe\), or tokenizer.json in it, found"
    with pytest.raises(ValueError, match=f"{expected} only vocab.json; set train_bpe.pretrained to another"):
        Tokenizer.from_pretrained(tmp_path, SPECIAL)
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(ValueError, match=f"{expected} none of them; set train_bpe.pretrained to another"):
        Tokenizer.from_pretrained(tmp_path, SPECIAL)


# What a file may set and still give our ids: flags of special tokens, and what is put around a text's ids.
# Refused, or taken although `tokenizers` gives the text other ids.
@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["added_tokens"][0].update(single_word=True),
        lambda c: c["added_tokens"][0].update(lstrip=True, rstrip=True),
        lambda c: c["added_tokens"][0].update(normalized=True),
        lambda c: c.update(
            post_processor={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
        ),
        lambda c: c.update(post_processor=BOS),
    ],
)
def test_same_ids_as_tokenizers(tmp_path: Path, change: Change) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    changed = content(tmp_path)
    change(changed)
    path = written(tmp_path, changed)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True  # as ours: a special token that is typed is text
    for text in (TEXT, "the <|endoftext|> other", "a<|endoftext|>b", " <|pad|>\n x"):
        expected = theirs.encode(text, add_special_tokens=False).ids
        for ours in (
            Tokenizer.load(path),
            Tokenizer.from_pretrained(path, SPECIAL),
            Tokenizer.from_pretrained(tmp_path, SPECIAL),
        ):
            assert ours.encode(text).tolist() == expected


# Why an added token that is not special is refused: `tokenizers` finds it in text even with
# encode_special_tokens.
def test_tokenizers_finds_what_is_not_special(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    changed = content(tmp_path)
    changed["added_tokens"][1]["special"] = False
    path = written(tmp_path, changed)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    assert theirs.encode("a<|pad|>b").ids[1:-1] == [265]
    for place in (path, tmp_path):
        with pytest.raises(
            ValueError, match=r"for the added token '<\|pad\|>' .*; set train_bpe.pretrained to another"
        ):
            Tokenizer.from_pretrained(place, SPECIAL)


# Special tokens of a taken tokenizer.json renumbered, or those that it lacks forgotten.
def test_take_a_tokenizer_json(tmp_path: Path) -> None:
    content(tmp_path)
    taken = Tokenizer.from_pretrained(tmp_path / "tokenizer.json", ["<|end|>", "<|pad|>"])
    assert taken.special == {"<|endoftext|>": 264, "<|pad|>": 265, "<|end|>": 266}
    with pytest.raises(ValueError, match=r"tokenizer.json: merge 1 \('t', 'he'\): 'the' is a special token"):
        Tokenizer.from_pretrained(tmp_path / "tokenizer.json", ["the"])
