"""The sections pretrain and sft of params.yaml; conf/pretrain and conf/sft explain every key."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from kernels.optimizers import OPTIMIZERS, AdamW
from stages.schema import check
from stages.sources.corpus import NOTHING

MOST = 2**31 - 1  # of a count, so that step numbers and products of two counts fit into 64 bits


@dataclass(frozen=True)
class Training:
    """What pretrain and sft have in common: the length of the run, its optimizer and how often it reports."""

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
    mtp_loss_weights: tuple[float, ...]
    val_every: int
    sample_every: int
    checkpoint_every: int

    def __post_init__(self) -> None:
        section = type(self).__name__.lower()

        def require(name: str, ok: bool, expected: str) -> None:
            check(ok, f"{section}.{name}", expected, getattr(self, name))

        require("seed", 0 <= self.seed < 2**63, "at least 0 and below 2**63")
        for name in (
            "steps",
            "micro_batch",
            "grad_accum_steps",
            "val_every",
            "sample_every",
            "checkpoint_every",
        ):
            require(name, 1 <= getattr(self, name) <= MOST, f"at least 1 and at most {MOST}")
        require("optimizer", self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")
        require("lr", self.lr > 0, "a number above 0")
        require("min_lr", 0 <= self.min_lr <= self.lr, f"0 to {section}.lr = {self.lr}")
        require(
            "warmup_steps",
            0 <= self.warmup_steps <= self.steps,
            f"0 to {section}.steps = {self.steps} (set both)",
        )
        if self.schedule == "cosine":
            require(
                "cooldown_steps",
                self.cooldown_steps == 0,
                f"0 with {section}.schedule=cosine (only wsd cools down)",
            )
        most = self.steps - self.warmup_steps
        require("cooldown_steps", 0 <= self.cooldown_steps <= most, f"0 to steps - warmup_steps = {most}")
        for name in ("beta1", "beta2"):
            require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        for name in ("weight_decay", "grad_clip"):
            require(name, getattr(self, name) >= 0, "at least 0")
        require("eps", self.eps > 0, "a number above 0")
        require(
            "mtp_loss_weights", all(weight >= 0 for weight in self.mtp_loss_weights), "weights of at least 0"
        )
        require(
            "mtp_loss_weights",
            bool(self.mtp_loss_weights) and self.mtp_loss_weights[0] > 0,
            "a first weight (next token) above 0",
        )

    def make_optimizer(self) -> AdamW:
        """The optimizer with its constants."""
        kind = OPTIMIZERS[self.optimizer]
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})


@dataclass(frozen=True)
class Pretrain(Training):
    """conf/pretrain."""

    document_mask: bool
    init_from: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            bool(self.init_from), "pretrain.init_from", f"a checkpoint's folder, or {NOTHING}", self.init_from
        )
        path = Path(self.init_from).resolve()
        if not {Path("data", stage).resolve() for stage in ("pretrain", "sft")}.isdisjoint(
            [path, *path.parents]
        ):
            raise ValueError(
                f"pretrain.init_from: {self.init_from} is made anew by this pipeline, and DVC deletes it before: keep a copy "
                f"(mkdir -p models && cp -rL {self.init_from} models/first) and set pretrain.init_from=models/first"
            )

    @property
    def initial(self) -> Path | None:
        """The folder of the checkpoint whose weights training starts with; None: random weights."""
        return None if self.init_from == NOTHING else Path(self.init_from)


@dataclass(frozen=True)
class Sft(Training):
    """conf/sft."""

    overflow: Literal["drop", "truncate"]
