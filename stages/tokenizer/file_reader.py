"""Reads tokenizer files: Hugging Face's tokenizer.json, and GPT-2's two files. Checks everything that
encoding relies on.

Our encoder never finds an added token in text, like `tokenizers` with encode_special_tokens. A special
token's flags single_word, lstrip, rstrip and normalized therefore change no ids, and are ignored.
`tokenizers` always finds an added token that is not special, so a file with such a token is refused. A
post_processor is ignored too: it adds tokens around a text's ids.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.tokenizer.file_format import BYTE_TO_CHARACTER, CHARACTER_TO_BYTE, MAX_VOCAB, Vocabulary

# Options that change the encoding, and the values that mean GPT-2's.
_MODEL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "dropout": (None, 0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
    "ignore_merges": (None, False),
}


def read_tokenizer_json(path: Path, special_tokens: Sequence[str] = ()) -> Vocabulary:
    """Read a byte-level BPE tokenizer.json.

    Args:
        path: the file.
        special_tokens: special as well, besides the file's added tokens, if the file has them.

    Raises:
        ValueError: the file is missing, not JSON, not byte-level BPE like GPT-2's, or inconsistent.
    """
    content = _read_json(path)
    model = _field(path, content, "model", dict)
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"{path}: expected model.type BPE, got {model['type']!r}")
    for key, allowed in _MODEL_OPTIONS.items():
        if model.get(key) not in allowed:
            raise ValueError(
                f"{path}: expected model.{key} {json.dumps(allowed[-1])}, got {json.dumps(model[key])}"
            )
    if content.get("normalizer") is not None:
        raise ValueError(f"{path}: expected normalizer null, got {_short(content['normalizer'])}")
    splitter = _field(path, content, "pre_tokenizer", dict)
    if (splitter.get("type"), splitter.get("add_prefix_space"), splitter.get("use_regex", True)) != (
        "ByteLevel",
        False,
        True,
    ):
        expected = (
            'expected pre_tokenizer {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true}'
        )
        raise ValueError(f"{path}: {expected}, got {_short(splitter)}")
    vocab: dict[str, Any] = _field(path, model, "vocab", dict)
    special = {name: vocab[name] for name in special_tokens if name in vocab}
    special.update(_added_tokens(path, _field(path, content, "added_tokens", list)))
    merges = [_pair(path, number, row) for number, row in enumerate(_field(path, model, "merges", list))]
    return _assemble(path, vocab, merges, special)


def _added_tokens(path: Path, rows: Sequence[Any]) -> dict[str, int]:
    """The id of each added token. All of them must be special."""
    added: dict[str, int] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("content"), str) or not _is_id(row.get("id")):
            raise ValueError(
                f"{path}: expected added_tokens[{number}] with content and id, got {_short(row)}"
            )
        name, token = row["content"], row["id"]
        if row.get("special") is not True:
            got = _short(row["special"]) if "special" in row else "nothing"
            why = "tokenizers finds any other in text, we do not; set it to true if no text may give it"
            raise ValueError(
                f"{path}: expected special true for the added token {name!r} (id {token}), got {got}: {why}"
            )
        if added.setdefault(name, token) != token:
            raise ValueError(f"{path}: the added token {name!r} has two ids, {added[name]} and {token}")
    return added


def read_folder(folder: Path, special_tokens: Sequence[str]) -> Vocabulary:
    """Read GPT-2's two files if the folder has both, else its tokenizer.json.

    Args:
        folder: with vocab.json (or encoder.json) and merges.txt (or vocab.bpe), or with tokenizer.json.
        special_tokens: special, if the vocabulary has them.

    Raises:
        ValueError: a file is missing or malformed.
    """
    pairs = (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe"))
    found = [[folder / name for name in names if (folder / name).is_file()] for names in pairs]
    if all(found):
        return _read_gpt2(folder, found[0][0], found[1][0], special_tokens)
    if (folder / "tokenizer.json").is_file():
        return read_tokenizer_json(folder / "tokenizer.json", special_tokens)
    expected = "expected vocab.json and merges.txt (or encoder.json and vocab.bpe), or tokenizer.json in it"
    names = [path.name for paths in found for path in paths]
    raise ValueError(f"{folder}: {expected}, found {f'only {names[0]}' if names else 'none of them'}")


def _read_gpt2(
    folder: Path, vocab_path: Path, merges_path: Path, special_tokens: Sequence[str]
) -> Vocabulary:
    """The vocabulary of GPT-2's two files."""
    vocab = _read_json(vocab_path)
    try:
        lines = merges_path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{merges_path}: expected UTF-8, got {error.reason} at byte {error.start}") from None
    merges = [
        _pair(merges_path, number, line)
        for number, line in enumerate(lines)
        if line and not line.startswith("#version")
    ]
    return _assemble(folder, vocab, merges, {name: vocab[name] for name in special_tokens if name in vocab})


def _assemble(
    path: Path, vocab: Mapping[str, Any], merges: Sequence[tuple[str, str]], special: Mapping[str, int]
) -> Vocabulary:
    """The vocabulary, built from the content of the files and checked."""
    written = _by_id(path, {**special, **vocab})
    ids = {text: token for token, text in enumerate(written)}
    for name, token in special.items():
        if ids[name] != token:
            raise ValueError(
                f"{path}: the special token {name!r} has the id {token}, but {ids[name]} in the vocabulary"
            )
    token_bytes = []
    for text in written:
        if text not in special and not (text and all(character in CHARACTER_TO_BYTE for character in text)):
            raise ValueError(
                f"{path}: expected tokens in GPT-2's byte characters, got {text!r} (id {ids[text]})"
            )
        token_bytes.append(
            b"" if text in special else bytes(CHARACTER_TO_BYTE[character] for character in text)
        )
    for byte, character in BYTE_TO_CHARACTER.items():
        if character not in ids or character in special:
            raise ValueError(
                f"{path}: expected a token for each byte, found none for byte {byte} ({character!r})"
            )
    rows: dict[tuple[int, int], int] = {}
    for number, (left, right) in enumerate(merges):
        for text in (left, right, left + right):
            if text not in ids or text in special:
                problem = "a special token" if text in special else "not in the vocabulary"
                raise ValueError(f"{path}: merge {number} ({left!r}, {right!r}): {text!r} is {problem}")
        if (ids[left], ids[right]) in rows:
            raise ValueError(f"{path}: merge {number} ({left!r}, {right!r}) occurs twice")
        rows[ids[left], ids[right]] = ids[left + right]
    return Vocabulary(token_bytes, [(*pair, token) for pair, token in rows.items()], dict(special))


def _by_id(path: Path, vocab: Mapping[str, Any]) -> list[str]:
    """The tokens in the order of their ids, which must be 0, 1, 2, ... without gaps."""
    if len(vocab) > MAX_VOCAB:
        raise ValueError(
            f"{path}: expected at most {MAX_VOCAB} tokens (shards hold uint16), got {len(vocab)}"
        )
    found: dict[int, str] = {}
    for text, token in vocab.items():
        if not _is_id(token):
            raise ValueError(f"{path}: expected an id from 0 for the token {text!r}, got {_short(token)}")
        if token in found:
            raise ValueError(f"{path}: the tokens {found[token]!r} and {text!r} have the same id {token}")
        found[token] = text
    for token in range(len(found)):
        if token not in found:
            raise ValueError(
                f"{path}: expected ids 0 to {len(found) - 1} for {len(found)} tokens, found none with {token}"
            )
    return [found[token] for token in range(len(found))]


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected JSON in UTF-8, got a damaged file ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {_short(content)}")
    return content


def _field(path: Path, table: Mapping[str, Any], key: str, kind: type) -> Any:
    """table[key], checked to be a `kind`."""
    if not isinstance(table.get(key), kind):
        name = "an object" if kind is dict else "a list"
        raise ValueError(
            f"{path}: expected {key} to be {name}, got {_short(table[key]) if key in table else 'nothing'}"
        )
    return table[key]


def _pair(path: Path, number: int, row: Any) -> tuple[str, str]:
    """Both tokens of a merge, given as "left right" or [left, right]."""
    parts = row.split(" ") if isinstance(row, str) else row
    if (
        not isinstance(parts, list)
        or len(parts) != 2
        or not all(part and isinstance(part, str) for part in parts)
    ):
        raise ValueError(f"{path}: expected merge {number} to be two tokens, got {_short(row)}")
    return parts[0], parts[1]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _short(value: Any) -> str:
    """A value as JSON of at most 120 characters, for an error message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."
