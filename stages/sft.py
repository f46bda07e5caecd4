"""The stage sft: trains the base model on conversations, which makes it a chat model.

The loop is the one of pretraining. It starts from the weights of the base checkpoint with fresh moments. Its
sequences are packed conversations. Only the tokens of the assistant, including the end of turn, count in the
loss. `python -m stages.sft [overrides]`; with runtime.plan=true it only prints the memory plan.
"""

import math
from itertools import takewhile
from pathlib import Path

from kernels.generation import Sampling, generate
from kernels.ranks import ALONE, Link
from stages.chat_template import read_conversations, render_all, render_prompt, special_id
from stages.checkpoint import load
from stages.interrupt import Interrupt
from stages.packing import EvalConversations, SftBatches
from stages.program import ranked_stage_main
from stages.ranks.gpus import training_rank_count
from stages.settings import Settings
from stages.special_tokens import END, PAD
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
        settings: uses sft, numerics and runtime; the model is the one in the base checkpoint.
        link: to the other ranks, which run the same.
        tokenizer_path, base, train, val: inputs.
        checkpoint, samples, curves, speed: outputs.

    Raises:
        ValueError: the base model belongs to another tokenizer or has another number of heads, no
            conversation fits, or training failed.
        SystemExit: Ctrl-C, after the state was saved.
    """
    tokenizer, training = Tokenizer.load(tokenizer_path), settings.sft
    start = load(base, tokenizer.sha256)
    config = start.config
    if (given := len(training.mtp_loss_weights)) != config.mtp_heads:
        raise ValueError(f"sft.mtp_loss_weights: expected one weight for each of the {config.mtp_heads} MTP "
                         f"heads of {base}, "
                         f"got {given}; set model.mtp_heads={config.mtp_heads}, or pretrain such a model "
                         "first")  # fmt: skip
    engine = build_engine(settings, training, config, link)
    if engine is None:
        return
    engine.load(start.weights)
    packing = {
        "micro_batch": training.micro_batch,
        "context": config.context,
        "pad_id": special_id(tokenizer, PAD),
    }
    trained_on, held_out = (
        render_all(read_conversations(path), tokenizer, context=config.context, overflow=training.overflow)
        for path in (train, val)
    )
    if link.rank == 0:
        print(f"training: {trained_on.describe()}\nvalidation: {held_out.describe()}", flush=True)
    batches = SftBatches(trained_on, seed=training.seed, **packing)
    windows = EvalConversations(held_out, **packing)
    answer_bytes = int(tokenizer.token_lengths[held_out.ids[held_out.supervised]].sum())
    question = _first_question(val)
    prompt = render_prompt(question, tokenizer)[-(config.context // 2) :]  # leaves room for an answer

    def validate(interrupt: Interrupt) -> ValidationResult:
        nats, targets = held_out_nats(engine, windows, interrupt.check)
        return ValidationResult(nats / targets, nats / math.log(2) / answer_bytes)

    def sample(seed: int, interrupt: Interrupt) -> str:
        sampling = Sampling(temperature=0.8, top_k=50, seed=seed)
        answer = generate(
            engine, prompt.tolist(), sampling, max_tokens=SAMPLE_TOKENS, stop=[special_id(tokenizer, END)]
        )
        return f"{question[-1]['content']} -> {tokenizer.decode(interrupt.checked(answer))}"

    run_stage(settings, training, engine, tokenizer.sha256, Task(batches, train_step, validate, sample),
              deps=[tokenizer_path, base, train, val],
              outs=Outs(checkpoint, samples, curves, speed))  # fmt: skip


def _first_question(path: Path) -> list[dict[str, str]]:
    """The messages before the first answer of the first conversation that has any; a greeting if none has."""
    beginnings = (
        list(takewhile(lambda message: message["role"] != "assistant", messages))
        for messages in read_conversations(path)
    )
    return next(filter(None, beginnings), [{"role": "user", "content": "Hello."}])


def main() -> None:
    """Runs the stage with params.yaml and the overrides of the command line."""
    ranked_stage_main("sft", run, lambda settings: training_rank_count(settings.runtime, settings.sft))


if __name__ == "__main__":
    main()
