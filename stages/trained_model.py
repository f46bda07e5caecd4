"""A trained model as eval, chat, generate and export open it: its checkpoint, its tokenizer and, if wanted,
an engine.
"""

from dataclasses import dataclass
from pathlib import Path

from kernels.config import Numerics
from kernels.engine import Engine
from kernels.ranks import ALONE, Link
from stages.checkpoint import MODEL, REGENERATE_HINT, Checkpoint, load
from stages.tokenizer import Tokenizer
from stages.trained_stages import TRAINED_STAGES


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint and the tokenizer it was trained with."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer

    def engine(
        self,
        *,
        numerics: Numerics | None = None,
        micro_batch: int = 1,
        device: str = "auto",
        threads: int = 0,
        link: Link = ALONE,
    ) -> Engine:
        """An inference engine with the weights of the model; the arguments are those of Engine."""
        engine = Engine(
            self.checkpoint.config,
            numerics or Numerics(),
            micro_batch=micro_batch,
            device=device,
            threads=threads,
            seed=None,
            training=False,
            link=link,
        )
        engine.load(self.checkpoint.weights)
        return engine


def open_model(model: str | Path, tokenizer_path: Path) -> TrainedModel:
    """Reads and validates a trained model.

    Args:
        model: name of the stage that trained it, or the folder of its checkpoint.
        tokenizer_path: the tokenizer.json it was trained with.

    Raises:
        ValueError: a file is missing or damaged, or the checkpoint belongs to another tokenizer.
    """
    folders = {stage.name: stage.checkpoint for stage in TRAINED_STAGES}
    folder = folders.get(str(model), Path(model))
    for path, option in ((tokenizer_path, "tokenizer"), (folder / MODEL, "model")):
        if not path.is_file():
            raise ValueError(f"{path}: file not found; {REGENERATE_HINT}, or set {option} to another path")
    tokenizer = Tokenizer.load(tokenizer_path)
    return TrainedModel(load(folder, tokenizer.sha256), tokenizer)
