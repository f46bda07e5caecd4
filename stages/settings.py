"""params.yaml and command-line overrides -> frozen, validated dataclasses.

One dataclass a section, one field a key; conf/ explains every key. A key that is unknown, missing, of the wrong type or
out of range is one ValueError that names it. Overrides are written as `dvc exp run -S` takes them:

    pretrain.lr=1e-3            a value: edits what params.yaml holds
    model=gpt2_124m             a file of a group: composes conf/ anew, exactly as DVC does, and says what differs
    +experiment=smoke           a named run: likewise
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from kernels.config import Mlp, ModelConfig, Norm, Numerics, Optimizer, Position
from stages.corpus import NOTHING, Conversations, Corpus
from stages.overrides import apply_overrides
from stages.schema import build, check
from stages.text_files import write_text, writing

BYTES = 256  # the part of every vocabulary that is not learned
USAGE = "[key=value ...]  for example pretrain.steps=200 model=gpt2_124m +experiment=smoke; keys and values: conf/"


@dataclass(frozen=True)
class TrainBpe:
    """conf/train_bpe: how the vocabulary is made."""

    vocab_size: int
    sample_bytes: int
    pattern: Literal["gpt2"]
    special_tokens: tuple[str, ...]
    take: Path | None

    def __post_init__(self) -> None:
        least = BYTES + len(self.special_tokens)
        expected = f"{least} (bytes and special tokens) to 65536 (shards hold uint16)"
        check(least <= self.vocab_size <= 65536, "train_bpe.vocab_size", expected, self.vocab_size)
        check(self.sample_bytes >= 1, "train_bpe.sample_bytes", "at least 1", self.sample_bytes)
        distinct = len(set(self.special_tokens)) == len(self.special_tokens) and "" not in self.special_tokens
        check(distinct, "train_bpe.special_tokens", "distinct texts, none empty", list(self.special_tokens))


@dataclass(frozen=True)
class Shard:
    """conf/shard: how the token files are cut."""

    tokens_per_shard: int
    take: Path | None

    def __post_init__(self) -> None:
        check(self.tokens_per_shard >= 1000, "shard.tokens_per_shard", "at least 1000", self.tokens_per_shard)


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
        return ModelConfig(vocab_size=vocab_size, **{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True)
class Training:
    """What pretrain and sft have in common: the length of the run, its optimizer and how often it reports."""

    seed: int
    steps: int
    micro_batch: int
    grad_accum_steps: int
    optimizer: Optimizer
    schedule: Literal["cosine", "wsd"]
    lr: float
    min_lr: float
    warmup_steps: int
    cooldown_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    grad_clip: float
    mtp_weights: tuple[float, ...]
    val_every: int
    sample_every: int
    checkpoint_every: int

    def __post_init__(self) -> None:
        section = type(self).__name__.lower()

        def require(name: str, ok: bool, expected: str) -> None:
            check(ok, f"{section}.{name}", expected, getattr(self, name))

        require("seed", self.seed >= 0, "at least 0")
        for name in ("steps", "micro_batch", "grad_accum_steps", "val_every", "sample_every", "checkpoint_every"):
            require(name, getattr(self, name) >= 1, "at least 1")
        require("lr", self.lr > 0, "a number above 0")
        require("min_lr", 0 <= self.min_lr <= self.lr, f"0 to {section}.lr = {self.lr}")
        require("warmup_steps", 0 <= self.warmup_steps <= self.steps, f"0 to {section}.steps = {self.steps} (set both)")
        if self.schedule == "cosine":
            require("cooldown_steps", self.cooldown_steps == 0, f"0 with {section}.schedule=cosine (only wsd cools down)")
        most = self.steps - self.warmup_steps
        require("cooldown_steps", 0 <= self.cooldown_steps <= most, f"0 to steps - warmup_steps = {most}")
        for name in ("beta1", "beta2"):
            require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        for name in ("weight_decay", "grad_clip"):
            require(name, getattr(self, name) >= 0, "at least 0")
        require("eps", self.eps > 0, "a number above 0")
        require("mtp_weights", all(weight >= 0 for weight in self.mtp_weights), "weights of at least 0")
        require("mtp_weights", bool(self.mtp_weights) and self.mtp_weights[0] > 0, "a first weight (next token) above 0")


@dataclass(frozen=True)
class Pretrain(Training):
    """conf/pretrain."""

    within_documents: bool


@dataclass(frozen=True)
class Sft(Training):
    """conf/sft."""

    too_long: Literal["drop", "cut"]


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
        check(self.max_tokens >= 1, "eval.max_tokens", "at least 1", self.max_tokens)
        fits = self.temperature == 0 or self.temperature >= 1e-6  # kernels.generation.LEAST_TEMPERATURE, too slow to import
        check(fits, "eval.temperature", "0 (greedy) or at least 1e-6", self.temperature)
        check(self.top_k >= 0, "eval.top_k", "at least 0 (0 is off)", self.top_k)
        check(0 < self.top_p <= 1, "eval.top_p", "above 0 and at most 1 (1 is off)", self.top_p)
        check(self.seed >= 0, "eval.seed", "at least 0", self.seed)
        check(self.micro_batch >= 1, "eval.micro_batch", "at least 1", self.micro_batch)


@dataclass(frozen=True)
class Runtime:
    """conf/runtime: what cannot change a result; no stage tracks it."""

    device: Literal["auto", "cpu", "cuda"]
    threads: int
    display: Literal["auto", "live", "plain"]
    plan: bool

    def __post_init__(self) -> None:
        check(self.threads >= 0, "runtime.threads", "at least 0 (0 is all cores)", self.threads)


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
        ValueError: the first key that is wrong, too few MTP weights, or ready-made shards without their tokenizer.
    """
    settings = build(Settings, values, "")
    check(settings.shard.take is None or settings.train_bpe.take is not None, "train_bpe.take", "shard.take's tokenizer", NOTHING)
    heads = settings.model.mtp_heads
    for section in (settings.pretrain, settings.sft):
        weights, name = section.mtp_weights, f"{type(section).__name__.lower()}.mtp_weights"
        check(len(weights) >= heads, name, f"a weight for each of model.mtp_heads = {heads}", list(weights))
        settings = replace(settings, **{type(section).__name__.lower(): replace(section, mtp_weights=weights[:heads])})
    return settings


def stage_main(name: str, run: Callable[[Settings], None]) -> None:
    """A stage's main(): the command line -> settings -> run, alone in this checkout."""

    def stage(argv: list[str]) -> None:
        settings = load(argv)
        with nullcontext() if settings.runtime.plan else alone(name):  # a plan writes nothing
            run(settings)

    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"python -m stages.{name} {USAGE}")
    else:
        command_main(stage)


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Waits, with a line, while another stage runs in this checkout: one may read what another is about to replace.

    DVC's own locks know nothing of stages run by hand, nor of one that goes on after `dvc` alone was killed. The system frees
    this lock when its process ends, however it ends.

    Raises:
        ValueError: another stage was started while this one waited. Of several that wait only the last may run: the `dvc` of an
            earlier one may be gone, and what it would write replace what was made since.
    """
    folder, own = Path(".nanoeuler"), f"{name} (process {os.getpid()})"
    lock, running, last = FileLock(folder / "running.lock"), folder / "running", folder / "started"
    with writing(folder):
        folder.mkdir(exist_ok=True)
        last.write_text(own, encoding="utf-8", newline="\n")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            other = running.read_text(encoding="utf-8") if running.is_file() else "another stage"
            print(f"{name}: waiting for {other}, which runs in this checkout; Ctrl-C gives up", flush=True)
            lock.acquire()
            later = last.read_text(encoding="utf-8")
            if later != own:
                lock.release()
                raise ValueError(f"{name}: {later} was started while this one waited; start this one again if need be") from None
    try:
        write_text(running, own)
        yield
    finally:
        lock.release()


def command_main(run: Callable[[list[str]], None]) -> None:
    """Runs a program on its arguments; what its user can repair is one line on stderr, not a traceback.

    Exit code 1 after an error, 130 after Ctrl-C (DVC takes 0 for success, whatever happened before).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")  # Windows' consoles have another default
    try:
        run(sys.argv[1:])
    except BrokenPipeError:  # who read has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at the end
        raise SystemExit(1) from None
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
