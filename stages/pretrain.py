"""The stage pretrain: a language model trained on the token shards.

Reads the shards and the tokenizer; writes a checkpoint, curves and samples.
`python -m stages.pretrain [overrides]`; with runtime.plan=true it only prints the memory plan.
pretrain.init_from names a checkpoint whose weights replace the random initial weights; the run then has fresh
moments and starts its schedule at step 0.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from kernels.config import ModelConfig
from kernels.generation import Sampling, generate
from kernels.ranks import ALONE, Link
from stages.batches import EvalWindows, PretrainBatches
from stages.checkpoint import MODEL, WEIGHTS, load
from stages.interrupt import Interrupt
from stages.program import ranked_stage_main
from stages.ranks.gpus import training_rank_count
from stages.settings import Settings
from stages.shard_format import open_split
from stages.special_tokens import SEPARATOR
from stages.tokenizer import Tokenizer
from stages.training import Outs, Task, ValidationResult
from stages.training_stage import build_engine, run_stage
from stages.updates import held_out_nats, train_step

SAMPLE_TOKENS = 64


def run(
    settings: Settings,
    link: Link = ALONE,
    *,
    tokenizer_path: Path = Path("data/train_bpe/tokenizer.json"),
    shards: Path = Path("data/shard"),
    checkpoint: Path = Path("data/pretrain/checkpoint"),
    samples: Path = Path("data/pretrain/samples.txt"),
    curves: Path = Path("data/pretrain/curves"),
    speed: Path = Path("data/pretrain/speed.csv"),
) -> None:
    """Trains the model of settings.model on the shards.

    Args:
        settings: uses model, pretrain, numerics and runtime.
        link: to the other ranks, which run the same.
        tokenizer_path, shards: inputs, together with the checkpoint of pretrain.init_from.
        checkpoint, samples, curves, speed: outputs.

    Raises:
        ValueError: the shards belong to another tokenizer, a split is smaller than one window, init_from
            holds another model, or training failed.
        SystemExit: Ctrl-C, after the state was saved.
    """
    tokenizer, training = Tokenizer.load(tokenizer_path), settings.pretrain
    config = settings.model.config(tokenizer.vocab_size)
    weights = initial_weights(training.initial, config, tokenizer.sha256) if training.initial else None
    train = open_split(shards, "train", tokenizer.sha256, tokenizer.vocab_size)
    held_out = open_split(shards, "val", tokenizer.sha256, tokenizer.vocab_size)
    separator = tokenizer.special[SEPARATOR]  # shards exist only for tokenizers that have one
    reading: dict[str, Any] = {"micro_batch": training.micro_batch, "context": config.context,
               "separator_id": separator,
               "document_mask": training.document_mask}  # fmt: skip
    batches, windows = PretrainBatches(train, seed=training.seed, **reading), EvalWindows(held_out, **reading)
    engine = build_engine(settings, training, config, link)
    if engine is None:
        return
    if weights:
        if link.rank == 0:
            print(f"initial weights: {training.initial}", flush=True)
        engine.load(weights)

    def validate(interrupt: Interrupt) -> ValidationResult:
        nats, targets = held_out_nats(engine, windows, interrupt.check)
        return ValidationResult(nats / targets, nats / math.log(2) / held_out.counts.bytes)

    def sample(seed: int, interrupt: Interrupt) -> str:
        sampling = Sampling(temperature=0.8, top_k=50, seed=seed)
        tokens = generate(engine, [separator], sampling, max_tokens=SAMPLE_TOKENS, stop=[separator])
        return tokenizer.decode(interrupt.checked(tokens))

    run_stage(settings, training, engine, tokenizer.sha256, Task(batches, train_step, validate, sample),
              deps=[tokenizer_path, shards, *([training.initial] if training.initial else [])],
              outs=Outs(checkpoint, samples, curves, speed))  # fmt: skip


def initial_weights(folder: Path, config: ModelConfig, tokenizer_sha256: str) -> dict[str, np.ndarray]:
    """The weights of a checkpoint of the same model and the same tokenizer.

    Raises:
        ValueError: the folder holds no such checkpoint; the message says what to set.
    """
    found = load(folder, hint=f"set pretrain.init_from to a folder with {MODEL} and {WEIGHTS}")
    if found.tokenizer_sha256 != tokenizer_sha256:
        raise ValueError(
            f"pretrain.init_from: {folder} was trained with tokenizer {found.tokenizer_sha256[:12]}, but "
            "this run uses "
            f"tokenizer {tokenizer_sha256[:12]}; set train_bpe.pretrained to the tokenizer.json of that model"
        )
    theirs, ours = found.config.to_dict(), config.to_dict()
    if differing := [f"model.{key}={theirs[key]}" for key in theirs if theirs[key] != ours[key]]:
        raise ValueError(f"pretrain.init_from: {folder} holds another model; set {' '.join(differing)}")
    return found.weights


def main() -> None:
    """Runs the stage with params.yaml and the overrides of the command line."""
    ranked_stage_main(
        "pretrain", run, lambda settings: training_rank_count(settings.runtime, settings.pretrain)
    )


if __name__ == "__main__":
    main()
