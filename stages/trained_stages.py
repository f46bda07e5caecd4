"""The stages that train a model, in the order of the pipeline.

A new training stage needs one entry here and its own parts: stages/<name>.py with its test, a dataclass in
training_settings.py with a field in settings.py, conf/<name>/ with lines in conf/config.yaml and
conf/experiment/smoke.yaml, and lines in dvc.yaml. Order of stages, look-ahead, evaluation and --model of the
commands follow from TRAINED_STAGES.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["base", "chat"]  # a base model continues a text, a chat model answers messages


@dataclass(frozen=True)
class TrainedStage:
    """One training stage and its model.

    Args:
        name: of the stage: its module, its section of params.yaml and its folder in data/.
        model: the name of its model in the evaluation.
        kind: what the model was trained to do.
    """

    name: str
    model: str
    kind: Kind

    @property
    def checkpoint(self) -> Path:
        """The folder that the stage writes its model to."""
        return Path("data", self.name, "checkpoint")


TRAINED_STAGES = (
    TrainedStage("pretrain", model="base", kind="base"),
    TrainedStage("sft", model="chat", kind="chat"),
)
BASE_MODEL, CHAT_MODEL = TRAINED_STAGES[0].name, TRAINED_STAGES[-1].name  # the commands' default for --model
STAGES = (
    "download",
    "train_bpe",
    "shard",
    *(stage.name for stage in TRAINED_STAGES),
    "eval",
)  # as in dvc.yaml
