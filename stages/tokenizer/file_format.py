"""The format of tokenizer files: Hugging Face's tokenizer.json, written in one canonical form. `file_reader`
reads it.

The file writes a token with one character per byte. Printable ASCII and Latin-1 bytes are their own
characters. The other bytes, in order, are the characters from U+0100 on; a space is U+0120.

Source: Radford et al. 2019; the table is that of the released GPT-2 encoder, the format that of Hugging Face
tokenizers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_VOCAB = 65536  # shards hold ids as uint16

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# The bytes in GPT-2's order, which is also the order of their characters.
BYTE_ORDER = _PRINTABLE + [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_TO_CHARACTER = {
    byte: chr(byte if i < len(_PRINTABLE) else 0x100 + i - len(_PRINTABLE))
    for i, byte in enumerate(BYTE_ORDER)
}
CHARACTER_TO_BYTE = {character: byte for byte, character in BYTE_TO_CHARACTER.items()}


@dataclass(frozen=True)
class Vocabulary:
    """The content of a tokenizer file.

    Args:
        token_bytes: the bytes of each id, b"" for special tokens.
        merges: left, right and resulting id, in the order of application.
        special: id of each special token.
    """

    token_bytes: Sequence[bytes]
    merges: Sequence[tuple[int, int, int]]
    special: Mapping[str, int]

    def with_special(self, names: Sequence[str], where: str) -> "Vocabulary":
        """The vocabulary with the missing ones of `names` appended. `where` begins the error messages."""
        token_bytes, special = list(self.token_bytes), dict(self.special)
        ordinary = {token_text(token) for token in token_bytes if token}
        for name in names:
            if not name or name in ordinary:
                expected = "expected special tokens that no text gives, such as <|name|>"
                raise ValueError(f"{where}: {expected}, got {name!r}, an ordinary token of this vocabulary")
            if name not in special:
                special[name] = len(token_bytes)
                token_bytes.append(b"")
        if len(token_bytes) > MAX_VOCAB:
            raise ValueError(
                f"{where}: expected at most {MAX_VOCAB} tokens (shards hold uint16), got {len(token_bytes)}"
            )
        return Vocabulary(token_bytes, self.merges, special)


def tokenizer_json(vocabulary: Vocabulary) -> str:
    """The canonical tokenizer.json. Equal vocabularies give equal texts."""
    names = {token: name for name, token in vocabulary.special.items()}
    written = [names.get(token, token_text(text)) for token, text in enumerate(vocabulary.token_bytes)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": names[token], **flags} for token in sorted(names)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: token for token, text in enumerate(written)},
            "merges": [f"{written[left]} {written[right]}" for left, right, _ in vocabulary.merges],
        },
    }
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def token_text(text: bytes) -> str:
    """A token in the characters of a tokenizer file."""
    return "".join(BYTE_TO_CHARACTER[byte] for byte in text)
