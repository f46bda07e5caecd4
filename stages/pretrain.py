"""The stage pretrain: a language model from the token shards.

Reads the shards and the tokenizer, writes a checkpoint, its curves and its samples. `python -m stages.pretrain [overrides]`;
with runtime.plan=true it only prints the memory plan. pretrain.init_from names a checkpoint to start with in place of random
weights; its run has fresh moments and its own schedule from step 0.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from kernels.config import ModelConfig
from kernels.devices import open_ops
from kernels.engine import Engine
from kernels.generation import Sampling, generate
from kernels.memory import plan, report
from stages.batches import EvalWindows, PretrainBatches
from stages.checkpoint import MODEL, WEIGHTS, load
from stages.interrupt import Interrupt
from stages.program import stage_main
from stages.settings import Settings
from stages.shard_format import open_split
from stages.special_tokens import SEPARATOR
from stages.tokenizer import Tokenizer
from stages.training import Outs, Task, ValidationResult, announce, run_stage
from stages.updates import held_out_nats

SAMPLE_TOKENS = 64


def run(
    settings: Settings,
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
        settings: model, pretrain, numerics and runtime are used.
        tokenizer_path, shards: what it reads, with the checkpoint pretrain.init_from.
        checkpoint, samples, curves, speed: what it writes.

    Raises:
        ValueError: shards and tokenizer don't belong together, a split is smaller than one window, the checkpoint to start with
            is another model's, or training failed.
        SystemExit: Ctrl-C, after the state was saved.
    """
    tokenizer, training = Tokenizer.load(tokenizer_path), settings.pretrain
    config = settings.model.config(tokenizer.vocab_size)
    weights = initial_weights(training.initial, config, tokenizer.sha256) if training.initial else None
    train = open_split(shards, "train", tokenizer.sha256, tokenizer.vocab_size)
    held_out = open_split(shards, "val", tokenizer.sha256, tokenizer.vocab_size)
    separator = tokenizer.special[SEPARATOR]  # which the tokenizer of these shards has
    reading: dict[str, Any] = {"micro_batch": training.micro_batch, "context": config.context, "separator_id": separator,
               "document_mask": training.document_mask}  # fmt: skip
    batches, windows = PretrainBatches(train, seed=training.seed, **reading), EvalWindows(held_out, **reading)
    if settings.runtime.plan:
        ops = open_ops(settings.runtime.device, settings.numerics, threads=settings.runtime.threads)
        print(
            report(plan(config, settings.numerics, training.micro_batch, ops, optimizer=training.optimizer))
        )
        return
    engine = Engine(config, settings.numerics, micro_batch=training.micro_batch, device=settings.runtime.device,
                    threads=settings.runtime.threads, seed=training.seed, optimizer=training.optimizer)  # fmt: skip
    announce("pretrain", engine, config)
    if weights:
        print(f"starts with the weights of {training.initial}", flush=True)
        engine.load(weights)

    def validate(interrupt: Interrupt) -> ValidationResult:
        nats, targets = held_out_nats(
            engine, interrupt.checked(windows.batch(index) for index in range(len(windows)))
        )
        return ValidationResult(nats / targets, nats / math.log(2) / held_out.counts.bytes)

    def sample(seed: int, interrupt: Interrupt) -> str:
        sampling = Sampling(temperature=0.8, top_k=50, seed=seed)
        tokens = generate(engine, [separator], sampling, max_tokens=SAMPLE_TOKENS, stop=[separator])
        return tokenizer.decode(interrupt.checked(tokens))

    run_stage("pretrain", settings, training, engine, config, tokenizer.sha256, Task(batches, validate, sample),
              deps=[tokenizer_path, shards, *([training.initial] if training.initial else [])],
              outs=Outs(checkpoint, samples, curves, speed))  # fmt: skip


def initial_weights(folder: Path, config: ModelConfig, tokenizer_sha256: str) -> dict[str, np.ndarray]:
    """The weights of a finished checkpoint, for a run of the same model with the same tokenizer.

    Raises:
        ValueError: the folder holds no such checkpoint; the message says what to set.
    """
    found = load(folder, hint=f"set pretrain.init_from to a folder with {MODEL} and {WEIGHTS}")
    if found.tokenizer_sha256 != tokenizer_sha256:
        raise ValueError(
            f"pretrain.init_from: {folder} was trained with the tokenizer {found.tokenizer_sha256[:12]}, and the one "
            f"here is {tokenizer_sha256[:12]}: set train_bpe.pretrained to that model's tokenizer.json"
        )
    theirs, ours = found.config.to_dict(), config.to_dict()
    if differing := [f"model.{key}={theirs[key]}" for key in theirs if theirs[key] != ours[key]]:
        raise ValueError(f"pretrain.init_from: {folder} has another model: set {' '.join(differing)}")
    return found.weights


def main() -> None:
    """Runs the stage on params.yaml and the command line's overrides."""
    stage_main("pretrain", run)


if __name__ == "__main__":
    main()
