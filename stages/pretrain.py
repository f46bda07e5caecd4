"""The stage pretrain: a language model from the token shards.

Reads the shards and the tokenizer, writes a checkpoint, its curves and its log. `python -m stages.pretrain [overrides]`;
with runtime.plan=true it only prints the memory plan.
"""

import math
from pathlib import Path
from typing import Any

from kernels.devices import open_ops
from kernels.engine import Engine
from kernels.generation import Sampling, generate
from kernels.memory import plan, report
from stages.batches import EvalWindows, PretrainBatches
from stages.program import stage_main
from stages.settings import Settings
from stages.shard_format import SEPARATOR, open_split
from stages.tokenizer import Tokenizer
from stages.training import Outs, Task, Validation, announce, held_out_nats, run_stage

SAMPLE_TOKENS = 64


def run(
    settings: Settings,
    *,
    tokenizer: Path = Path("data/train_bpe/tokenizer.json"),
    shards: Path = Path("data/shard"),
    checkpoint: Path = Path("data/pretrain/checkpoint"),
    log: Path = Path("data/pretrain/log"),
    curves: Path = Path("data/pretrain/curves"),
) -> None:
    """Trains the model of settings.model on the shards.

    Args:
        settings: model, pretrain, numerics and runtime are used.
        tokenizer, shards: what it reads.
        checkpoint, log, curves: the folders it writes.

    Raises:
        ValueError: shards and tokenizer don't belong together, a split is smaller than one window, or training failed.
        KeyboardInterrupt: Ctrl-C, after the state was saved.
    """
    words, training = Tokenizer.load(tokenizer), settings.pretrain
    config = settings.model.config(words.vocab_size)
    train = open_split(shards, "train", words.sha256, words.vocab_size)
    held_out = open_split(shards, "val", words.sha256, words.vocab_size)
    separator = words.special[SEPARATOR]  # which the tokenizer of these shards has
    reading: dict[str, Any] = {"micro_batch": training.micro_batch, "context": config.context, "separator_id": separator,
               "within_documents": training.within_documents}  # fmt: skip
    batches, windows = PretrainBatches(train, seed=training.seed, **reading), EvalWindows(held_out, **reading)
    if settings.runtime.plan:
        ops = open_ops(settings.runtime.device, settings.numerics, threads=settings.runtime.threads)
        print(report(plan(config, settings.numerics, training.micro_batch, ops, optimizer=training.optimizer)))
        return
    engine = Engine(config, settings.numerics, micro_batch=training.micro_batch, device=settings.runtime.device,
                    threads=settings.runtime.threads, seed=training.seed, optimizer=training.optimizer)  # fmt: skip
    announce("pretrain", engine, config)

    def validate() -> Validation:
        nats, targets = held_out_nats(engine, (windows.batch(index) for index in range(len(windows))))
        return Validation(nats / targets, nats / math.log(2) / held_out.counts.bytes)

    def sample(seed: int) -> str:
        sampling = Sampling(temperature=0.8, top_k=50, seed=seed)
        return words.decode(generate(engine, [separator], sampling, max_tokens=SAMPLE_TOKENS, stop=[separator]))

    run_stage("pretrain", settings, training, engine, config, words.sha256, Task(batches, validate, sample),
              deps=[tokenizer, shards], outs=Outs(checkpoint, log, curves))  # fmt: skip


def main() -> None:
    """Runs the stage on params.yaml and the command line's overrides."""
    stage_main("pretrain", run)


if __name__ == "__main__":
    main()
