"""A tokenizer without merges, an engine that writes scripted answers, and a tiny model on disk."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine
from stages.checkpoint import save
from stages.tokenizer import Tokenizer
from stages.tokenizer.file_format import BYTE_ORDER, Vocabulary
from stages.trained_stages import TRAINED_STAGES

SPECIAL = ("<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TOKENIZER = Tokenizer(
    Vocabulary([bytes([byte]) for byte in BYTE_ORDER], [], {}).with_special(SPECIAL, "test")
)
END = TOKENIZER.special["<|end|>"]
CTRL_C = -1  # in a script: the user presses it while this token is computed


def ids(text: str) -> list[int]:
    """The ids of a text, one a byte."""
    return TOKENIZER.encode(text).tolist()


@dataclass
class ScriptCache:
    """As kernels.kv_cache.KVCache, for an engine that keeps nothing."""

    def truncate(self, length: int) -> None:
        """Nothing is kept."""


@dataclass
class ScriptedEngine:
    """Each new cache begins the next of `answers`, whose ids are generated one by one.

    `prompts` holds the prompt of each answer.
    """

    context: int
    answers: list[list[int]]
    prompts: list[list[int]] = field(default_factory=list)
    micro_batch: int = 1

    def __post_init__(self) -> None:
        self.decoder = self  # it draws the script
        self.config = ModelConfig(TOKENIZER.vocab_size, 1, 1, 1, 4, 4, self.context)
        self._rest: list[int] = []
        self._begins = False

    def cache(self, batch: int) -> ScriptCache:
        """Begins the next answer."""
        assert batch == 1
        self._rest, self._begins = list(self.answers.pop(0)), True
        return ScriptCache()

    def sample_stream(
        self,
        tokens: np.ndarray,
        cache: ScriptCache,
        uniforms: Iterable[np.ndarray],
        suppressed: np.ndarray,
        **sampling: float,
    ) -> Iterator[np.ndarray]:
        """The next ids of the script; a suppressed id gives the first id that is not suppressed."""
        if self._begins:
            self.prompts.append(tokens[0].tolist())
        self._begins = False
        for _ in uniforms:
            token = self._rest.pop(0)
            if token == CTRL_C:
                raise KeyboardInterrupt
            likely = np.arange(TOKENIZER.vocab_size) == token
            yield np.array(
                [np.where(np.isin(np.arange(TOKENIZER.vocab_size), suppressed), -1, likely).argmax()],
                np.int32,
            )

    def describe(self) -> str:
        """As Engine.describe."""
        return "scripted"


@dataclass
class ScriptedModel:
    """As stages.trained_model.TrainedModel, with a scripted engine."""

    scripted: ScriptedEngine
    tokenizer: Tokenizer = TOKENIZER

    def engine(self, *, threads: int) -> ScriptedEngine:
        """The engine, on any number of threads."""
        return self.scripted


def write_model(root: Path, *, context: int = 32, mtp_heads: int = 1) -> None:
    """Writes an untrained model as checkpoint of every training stage, and its tokenizer, below `root`."""
    config = ModelConfig(TOKENIZER.vocab_size, 1, 2, 1, 8, 8, context, mtp_heads)
    weights = Engine(config, Numerics(), micro_batch=1, seed=1, training=False).weights()
    TOKENIZER.save(root / "data/train_bpe/tokenizer.json")
    for stage in TRAINED_STAGES:
        save(root / stage.checkpoint, weights, config, TOKENIZER.sha256)
