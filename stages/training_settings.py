"""The sections of params.yaml that train a model; conf/ explains every key. One dataclass per training
stage.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from kernels.optimizers import OPTIMIZERS, AdamW
from stages.schema import require
from stages.sources.corpus import NOTHING
from stages.trained_stages import TRAINED_STAGES

MAX_COUNT = 2**31 - 1  # so that step numbers and products of two counts fit into 64 bits


@dataclass(frozen=True)
class Training:
    """The keys that every training stage has: length of the run, optimizer, reporting intervals."""

    seed: int
    steps: int
    micro_batch: int
    grad_accum_steps: int
    optimizer: str
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
    embedding_lr_scale: float
    head_lr_scale: float
    vector_lr_scale: float
    mtp_loss_weights: tuple[float, ...]
    val_every: int
    sample_every: int
    checkpoint_every: int

    def __post_init__(self) -> None:
        section = self.section()
        counts = (
            "steps",
            "micro_batch",
            "grad_accum_steps",
            "val_every",
            "sample_every",
            "checkpoint_every",
        )

        def require_key(name: str, ok: bool, expected: str) -> None:
            require(ok, f"{section}.{name}", expected, getattr(self, name))

        require_key("seed", 0 <= self.seed < 2**63, "at least 0 and below 2**63")
        for name in counts:
            ok = 1 <= getattr(self, name) <= MAX_COUNT
            require_key(name, ok, f"at least 1 and at most {MAX_COUNT}")
        require_key("optimizer", self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")
        require_key("lr", self.lr > 0, "a number above 0")
        require_key("min_lr", 0 <= self.min_lr <= self.lr, f"0 to {section}.lr = {self.lr}")
        ok = 0 <= self.warmup_steps <= self.steps
        require_key("warmup_steps", ok, f"0 to {section}.steps = {self.steps} (set both)")
        if self.schedule == "cosine":
            ok = self.cooldown_steps == 0
            require_key("cooldown_steps", ok, f"0 with {section}.schedule=cosine (only wsd has a cool-down)")
        max_cooldown = self.steps - self.warmup_steps
        ok = 0 <= self.cooldown_steps <= max_cooldown
        require_key("cooldown_steps", ok, f"0 to steps - warmup_steps = {max_cooldown}")
        for name in ("beta1", "beta2"):
            require_key(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        for name in ("weight_decay", "grad_clip"):
            require_key(name, getattr(self, name) >= 0, "at least 0")
        for name in ("eps", "embedding_lr_scale", "head_lr_scale", "vector_lr_scale"):
            require_key(name, getattr(self, name) > 0, "a number above 0")
        weights = self.mtp_loss_weights
        require_key("mtp_loss_weights", all(weight >= 0 for weight in weights), "weights of at least 0")
        ok = bool(weights) and weights[0] > 0
        require_key("mtp_loss_weights", ok, "a first weight (next token) above 0")

    def make_optimizer(self) -> AdamW:
        """The optimizer with its constants."""
        kind = OPTIMIZERS[self.optimizer]
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})

    @classmethod
    def section(cls) -> str:
        """The name of the section in params.yaml: the class name in lower case."""
        return cls.__name__.lower()


@dataclass(frozen=True)
class Pretrain(Training):
    """conf/pretrain."""

    document_mask: bool
    init_from: str

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"the folder of a checkpoint, or {NOTHING} for random weights"
        require(bool(self.init_from), "pretrain.init_from", expected, self.init_from)
        path = Path(self.init_from).resolve()
        written = {Path("data", stage.name).resolve() for stage in TRAINED_STAGES}
        if not written.isdisjoint([path, *path.parents]):
            raise ValueError(
                f"pretrain.init_from: {self.init_from} is an output of this pipeline, and DVC deletes it "
                f"before the run. Copy it (mkdir -p models && cp -rL {self.init_from} models/first) and set "
                "pretrain.init_from=models/first"
            )

    @property
    def initial(self) -> Path | None:
        """Folder of the checkpoint with the initial weights; None: random weights."""
        return None if self.init_from == NOTHING else Path(self.init_from)


@dataclass(frozen=True)
class Sft(Training):
    """conf/sft."""

    overflow: Literal["drop", "truncate"]
