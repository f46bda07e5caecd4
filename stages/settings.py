"""params.yaml and command-line overrides -> frozen, validated dataclasses.

One dataclass per section, one field per key; conf/ explains every key. An unknown, missing, ill-typed or
out-of-range key is a ValueError that names it. Overrides have the form of `dvc exp run -S`:

    pretrain.lr=1e-3            a value: changes the value in params.yaml
    model=gpt2_124m             a file of a group: composes conf/ again, exactly as DVC does, and prints what
    differs
    +experiment=smoke           a named run: as for a group
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from kernels.config import Mlp, ModelConfig, Norm, Numerics, Position, QkNorm
from stages.overrides import apply_overrides
from stages.schema import build, require
from stages.sources.corpus import NOTHING, Conversations, Corpus, check_watched
from stages.special_tokens import NEEDED
from stages.trained_stages import TRAINED_STAGES
from stages.training_settings import Pretrain, Sft

BYTE_IDS = 256  # number of ids for the single bytes, which every vocabulary has


@dataclass(frozen=True)
class TrainBpe:
    """conf/train_bpe: the vocabulary."""

    vocab_size: int
    sample_bytes: int
    pattern: Literal["gpt2"]
    special_tokens: tuple[str, ...]
    pretrained: Path | None

    def __post_init__(self) -> None:
        min_size = BYTE_IDS + len(self.special_tokens)
        expected = f"{min_size} (bytes and special tokens) to 65536 (shards hold uint16)"
        require(min_size <= self.vocab_size <= 65536, "train_bpe.vocab_size", expected, self.vocab_size)
        require(self.sample_bytes >= 1, "train_bpe.sample_bytes", "at least 1", self.sample_bytes)
        distinct = len(set(self.special_tokens)) == len(self.special_tokens) and "" not in self.special_tokens
        require(
            distinct,
            "train_bpe.special_tokens",
            "distinct texts that are not empty",
            list(self.special_tokens),
        )
        missing = [token for token in NEEDED if token not in self.special_tokens]
        needed = f"also {', '.join(missing)} (used by documents and the chat template)"
        require(not missing, "train_bpe.special_tokens", needed, list(self.special_tokens))


@dataclass(frozen=True)
class Shard:
    """conf/shard: the size of the token files."""

    tokens_per_shard: int
    pretokenized: Path | None

    def __post_init__(self) -> None:
        max_tokens = 2**31 - 1 - 2**20  # counts are int32; the last shard may be up to 2^20 tokens longer
        ok = 1000 <= self.tokens_per_shard <= max_tokens
        require(ok, "shard.tokens_per_shard", f"1000 to {max_tokens}", self.tokens_per_shard)


@dataclass(frozen=True)
class Model:
    """conf/model: the keys of kernels.config.ModelConfig without the vocabulary size, which the tokenizer
    gives.
    """

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
    # Parts that most models do not have. A model's file names them only if it uses them.
    qk_norm: QkNorm = "none"
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        self.config(vocab_size=BYTE_IDS)  # ModelConfig validates; any vocabulary size will do

    def config(self, vocab_size: int) -> ModelConfig:
        """The model for a tokenizer with vocab_size ids."""
        return ModelConfig(
            vocab_size=vocab_size, **{field.name: getattr(self, field.name) for field in fields(self)}
        )


@dataclass(frozen=True)
class Eval:
    """conf/eval: prompts and sampling of the report."""

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
        # 1e-6: the limit of kernels.generation, whose import takes too long here. A test compares them.
        ok = self.temperature == 0 or self.temperature >= 1e-6
        require(ok, "eval.temperature", "0 (greedy) or at least 1e-6", self.temperature)
        require(self.top_k >= 0, "eval.top_k", "at least 0 (0 is off)", self.top_k)
        require(0 < self.top_p <= 1, "eval.top_p", "above 0 and at most 1 (1 is off)", self.top_p)
        require(self.seed >= 0, "eval.seed", "at least 0", self.seed)
        require(self.micro_batch >= 1, "eval.micro_batch", "at least 1", self.micro_batch)


@dataclass(frozen=True)
class Runtime:
    """conf/runtime: where a run happens. DVC does not track it."""

    device: Literal["auto", "cpu", "cuda"]
    gpus: Literal["auto"] | int
    shard_optimizer: bool
    threads: int
    display: Literal["auto", "live", "plain"]
    plan: bool

    def __post_init__(self) -> None:
        require(self.gpus == "auto" or self.gpus >= 1, "runtime.gpus", "auto or at least 1", self.gpus)
        require(self.threads >= 0, "runtime.threads", "at least 0 (0 is all cores)", self.threads)


@dataclass(frozen=True)
class Settings:
    """All of params.yaml, one field per section."""

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
    """The settings of this run: params.yaml of the current folder with overrides.

    Args:
        argv: overrides in Hydra's grammar, as for `dvc exp run -S`.

    Raises:
        ValueError: a key, value or override is wrong, or the current folder is not the root of the
            repository.
    """
    root = Path.cwd()
    if not (root / "params.yaml").is_file() or not (root / "dvc.yaml").is_file():
        raise ValueError(f"{root} has no dvc.yaml and params.yaml; run from the repository's root")
    return validate(apply_overrides(root, argv))


def validate(values: Mapping[str, Any]) -> Settings:
    """Plain values -> Settings. MTP loss weights beyond the heads of the model are removed.

    Raises:
        ValueError: a key is wrong, there are too few MTP loss weights, DVC does not watch a local file, or
            ready-made shards come without their tokenizer.
    """
    settings = build(Settings, values, "")
    for name, sources, local_path in (
        ("corpus", settings.corpus.sources, settings.corpus.local_path),
        ("conversations", settings.conversations.sources, settings.conversations.local_path),
    ):
        check_watched(name, sources, local_path)
    ok = settings.shard.pretokenized is None or settings.train_bpe.pretrained is not None
    require(ok, "train_bpe.pretrained", "the tokenizer of shard.pretokenized", NOTHING)
    heads = settings.model.mtp_heads
    trained: dict[str, Any] = {}
    for stage in TRAINED_STAGES:
        section = getattr(settings, stage.name)
        weights, key = section.mtp_loss_weights, f"{stage.name}.mtp_loss_weights"
        require(len(weights) >= heads, key, f"a weight for each of model.mtp_heads = {heads}", list(weights))
        trained[stage.name] = replace(section, mtp_loss_weights=weights[:heads])
    return replace(settings, **trained)
