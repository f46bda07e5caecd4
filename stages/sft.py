"""The stage sft: the pretrained model becomes a chat model by training on conversations.

The loop is pretraining's; only the start and the batches are others: the base checkpoint's weights with fresh moments, and
conversations packed into rows, of which the assistant's tokens and its end of turn count. `python -m stages.sft [overrides]`;
with runtime.plan=true it only prints the memory plan.
"""

import math
from itertools import takewhile
from pathlib import Path

from kernels.devices import open_ops
from kernels.engine import Engine
from kernels.generation import Sampling, generate
from kernels.memory import plan, report
from stages.chat_template import read_conversations, render_all, render_prompt, special_id
from stages.checkpoint import load
from stages.interrupt import Interrupt
from stages.packing import EvalConversations, SftBatches
from stages.program import stage_main
from stages.settings import Settings
from stages.special_tokens import END, PAD
from stages.tokenizer import Tokenizer
from stages.training import Outs, Task, ValidationResult, announce, run_stage
from stages.updates import held_out_nats

SAMPLE_TOKENS = 64


def run(
    settings: Settings,
    *,
    tokenizer_path: Path = Path("data/train_bpe/tokenizer.json"),
    base: Path = Path("data/pretrain/checkpoint"),
    train: Path = Path("data/download/conversations.train.jsonl.zst"),
    val: Path = Path("data/download/conversations.val.jsonl.zst"),
    checkpoint: Path = Path("data/sft/checkpoint"),
    samples: Path = Path("data/sft/samples.txt"),
    curves: Path = Path("data/sft/curves"),
    speed: Path = Path("data/sft/speed.csv"),
) -> None:
    """Trains the base model on the conversations.

    Args:
        settings: sft, numerics and runtime are used; the model is the checkpoint's.
        tokenizer_path, base, train, val: what it reads.
        checkpoint, samples, curves, speed: what it writes.

    Raises:
        ValueError: base model and tokenizer or weights of heads don't belong together, no conversation fits, or training failed.
        SystemExit: Ctrl-C, after the state was saved.
    """
    tokenizer, training = Tokenizer.load(tokenizer_path), settings.sft
    start = load(base, tokenizer.sha256)
    config = start.config
    if (given := len(training.mtp_loss_weights)) != config.mtp_heads:
        raise ValueError(f"sft.mtp_loss_weights: expected a weight for each of the {config.mtp_heads} heads of {base}, "
                         f"got {given}: set model.mtp_heads={config.mtp_heads}, or pretrain such a model first")  # fmt: skip
    if settings.runtime.plan:
        ops = open_ops(settings.runtime.device, settings.numerics, threads=settings.runtime.threads)
        print(
            report(plan(config, settings.numerics, training.micro_batch, ops, optimizer=training.optimizer))
        )
        return
    engine = Engine(config, settings.numerics, micro_batch=training.micro_batch, device=settings.runtime.device,
                    threads=settings.runtime.threads, seed=training.seed, optimizer=training.optimizer)  # fmt: skip
    announce("sft", engine, config)
    engine.load(start.weights)
    packing = {
        "micro_batch": training.micro_batch,
        "context": config.context,
        "pad_id": special_id(tokenizer, PAD),
    }
    learnt, held_out = (render_all(read_conversations(path), tokenizer, context=config.context, overflow=training.overflow)
                        for path in (train, val))  # fmt: skip
    print(f"training: {learnt.describe()}\nvalidation: {held_out.describe()}", flush=True)
    batches, windows = (
        SftBatches(learnt, seed=training.seed, **packing),
        EvalConversations(held_out, **packing),
    )
    answer_bytes = int(tokenizer.token_lengths[held_out.ids[held_out.supervised]].sum())
    beginnings = (
        list(takewhile(lambda message: message["role"] != "assistant", one))
        for one in read_conversations(val)
    )
    question = next(filter(None, beginnings), [{"role": "user", "content": "Hello."}])
    prompt = render_prompt(question, tokenizer)[-(config.context // 2) :]  # leaves room for an answer

    def validate(interrupt: Interrupt) -> ValidationResult:
        nats, targets = held_out_nats(
            engine, interrupt.checked(windows.batch(index) for index in range(len(windows)))
        )
        return ValidationResult(nats / targets, nats / math.log(2) / answer_bytes)

    def sample(seed: int, interrupt: Interrupt) -> str:
        sampling = Sampling(temperature=0.8, top_k=50, seed=seed)
        answer = generate(
            engine, prompt.tolist(), sampling, max_tokens=SAMPLE_TOKENS, stop=[special_id(tokenizer, END)]
        )
        return f"{question[-1]['content']} -> {tokenizer.decode(interrupt.checked(answer))}"

    run_stage("sft", settings, training, engine, config, tokenizer.sha256, Task(batches, validate, sample),
              deps=[tokenizer_path, base, train, val], outs=Outs(checkpoint, samples, curves, speed))  # fmt: skip


def main() -> None:
    """Runs the stage on params.yaml and the command line's overrides."""
    stage_main("sft", run)


if __name__ == "__main__":
    main()
