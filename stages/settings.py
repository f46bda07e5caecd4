"""params.yaml and command-line overrides -> frozen, validated dataclasses.

One dataclass a section, one field a key; conf/ explains every key. A key that is unknown, missing, of the wrong type or
out of range is one ValueError that names it. Overrides are written as `dvc exp run -S` takes them:

    pretrain.lr=1e-3            a value: edits what params.yaml holds
    model=gpt2_124m             a file of a group: composes conf/ anew, exactly as DVC does, and says what differs
    +experiment=smoke           a named run: likewise
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from kernels.config import Mlp, ModelConfig, Norm, Numerics, Position
from stages.overrides import apply_overrides
from stages.schema import build, require
from stages.sources.corpus import NOTHING, Conversations, Corpus, check_watched
from stages.special_tokens import NEEDED
from stages.training_settings import Pretrain, Sft

BYTES = 256  # the part of every vocabulary that is not learned


@dataclass(frozen=True)
class TrainBpe:
    """conf/train_bpe: how the vocabulary is made."""

    vocab_size: int
    sample_bytes: int
    pattern: Literal["gpt2"]
    special_tokens: tuple[str, ...]
    pretrained: Path | None

    def __post_init__(self) -> None:
        least = BYTES + len(self.special_tokens)
        expected = f"{least} (bytes and special tokens) to 65536 (shards hold uint16)"
        require(least <= self.vocab_size <= 65536, "train_bpe.vocab_size", expected, self.vocab_size)
        require(self.sample_bytes >= 1, "train_bpe.sample_bytes", "at least 1", self.sample_bytes)
        distinct = len(set(self.special_tokens)) == len(self.special_tokens) and "" not in self.special_tokens
        require(distinct, "train_bpe.special_tokens", "distinct texts, none empty", list(self.special_tokens))
        missing = [token for token in NEEDED if token not in self.special_tokens]
        needed = f"also {', '.join(missing)} (documents and the chat template need them)"
        require(not missing, "train_bpe.special_tokens", needed, list(self.special_tokens))


@dataclass(frozen=True)
class Shard:
    """conf/shard: how the token files are cut."""

    tokens_per_shard: int
    pretokenized: Path | None

    def __post_init__(self) -> None:
        most = 2**31 - 1 - 2**20  # counts are int32, and a short end makes the last shard that much longer
        require(
            1000 <= self.tokens_per_shard <= most,
            "shard.tokens_per_shard",
            f"1000 to {most}",
            self.tokens_per_shard,
        )


@dataclass(frozen=True)
class Model:
    """conf/model: all of kernels.config.ModelConfig but the vocabulary, which train_bpe's tokenizer brings."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    context: int
    mtp_heads: int
    norm: Norm
    position: Position
    mlp: Mlp
    bias: bool
    tied_head: bool
    rope_base: float
    norm_eps: float

    def __post_init__(self) -> None:
        self.config(vocab_size=BYTES)  # ModelConfig validates; the vocabulary does not matter for that

    def config(self, vocab_size: int) -> ModelConfig:
        """The model for a tokenizer of vocab_size ids."""
        return ModelConfig(
            vocab_size=vocab_size, **{field.name: getattr(self, field.name) for field in fields(self)}
        )


@dataclass(frozen=True)
class Eval:
    """conf/eval: what is measured and what is sampled."""

    prompts: tuple[str, ...]
    chat_prompts: tuple[str, ...]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    micro_batch: int

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "eval.max_tokens", "at least 1", self.max_tokens)
        fits = (
            self.temperature == 0 or self.temperature >= 1e-6
        )  # kernels.generation.LEAST_TEMPERATURE, too slow to import
        require(fits, "eval.temperature", "0 (greedy) or at least 1e-6", self.temperature)
        require(self.top_k >= 0, "eval.top_k", "at least 0 (0 is off)", self.top_k)
        require(0 < self.top_p <= 1, "eval.top_p", "above 0 and at most 1 (1 is off)", self.top_p)
        require(self.seed >= 0, "eval.seed", "at least 0", self.seed)
        require(self.micro_batch >= 1, "eval.micro_batch", "at least 1", self.micro_batch)


@dataclass(frozen=True)
class Runtime:
    """conf/runtime: what cannot change a result; no stage tracks it."""

    device: Literal["auto", "cpu", "cuda"]
    threads: int
    display: Literal["auto", "live", "plain"]
    plan: bool

    def __post_init__(self) -> None:
        require(self.threads >= 0, "runtime.threads", "at least 0 (0 is all cores)", self.threads)


@dataclass(frozen=True)
class Settings:
    """All of params.yaml, one field a section."""

    corpus: Corpus
    conversations: Conversations
    train_bpe: TrainBpe
    shard: Shard
    model: Model
    pretrain: Pretrain
    sft: Sft
    eval: Eval
    numerics: Numerics
    runtime: Runtime


def load(argv: Sequence[str]) -> Settings:
    """The settings of this run: params.yaml of the current folder, and overrides.

    Args:
        argv: overrides in Hydra's grammar, as `dvc exp run -S` takes them.

    Raises:
        ValueError: a key, value or override is wrong, or the current folder is not the repository's root; one line.
    """
    root = Path.cwd()
    if not (root / "params.yaml").is_file() or not (root / "dvc.yaml").is_file():
        raise ValueError(f"{root} has no dvc.yaml and params.yaml: run from the repository's root")
    return validate(apply_overrides(root, argv))


def validate(values: Mapping[str, Any]) -> Settings:
    """Plain values -> Settings, with the MTP weights of heads that the model lacks cut off.

    Raises:
        ValueError: the first key that is wrong, too few MTP weights, a local file that DVC does not watch, or ready-made
            shards without their tokenizer.
    """
    settings = build(Settings, values, "")
    for name, sources, local_path in (
        ("corpus", settings.corpus.sources, settings.corpus.local_path),
        ("conversations", settings.conversations.sources, settings.conversations.local_path),
    ):
        check_watched(name, sources, local_path)
    require(
        settings.shard.pretokenized is None or settings.train_bpe.pretrained is not None,
        "train_bpe.pretrained",
        "shard.pretokenized's tokenizer",
        NOTHING,
    )
    heads = settings.model.mtp_heads
    for section in (settings.pretrain, settings.sft):
        weights, name = section.mtp_loss_weights, f"{type(section).__name__.lower()}.mtp_loss_weights"
        require(len(weights) >= heads, name, f"a weight for each of model.mtp_heads = {heads}", list(weights))
        settings = replace(
            settings, **{type(section).__name__.lower(): replace(section, mtp_loss_weights=weights[:heads])}
        )
    return settings
