"""What a later stage would refuse, found when a stage starts: an expensive stage must not run for nothing.

Each check takes parameters alone, or files that the stages before this one have written. settings.py checks every parameter
by itself; here stand the checks that need several sections, the data or the machine. A check reads no more than it must: the
manifest, the tokenizer, conversations up to the first that fits.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from stages.settings import Settings

ORDER = ("download", "train_bpe", "shard", "pretrain", "sft", "eval")
CHUNK = 256  # conversations rendered in one call, until one fits
STATES = 3  # on the disk at once: the two newest to resume from, and the one that is being written; one more with wsd


def objections(stage: str, settings: Settings, root: Path = Path()) -> Iterator[str]:
    """Lines that say what a stage after `stage` would refuse; each names the stage, the key and what to set.

    Args:
        stage: the one that starts.
        settings: all of them.
        root: of the repository.
    """
    data, place = root / "data", ORDER.index(stage)
    yield from _device(stage, settings)
    yield from _initial_model(stage, settings, root)
    yield from _disk(stage, settings, root)
    if place > ORDER.index("download"):
        yield from _windows(stage, settings, data / "download" / "manifest.json")
    if place > ORDER.index("train_bpe") and (data / "train_bpe" / "tokenizer.json").is_file():
        yield from _prompts(stage, settings, data / "train_bpe" / "tokenizer.json")
        yield from _conversations(stage, settings, data)
    if stage == "pretrain":
        yield from _memory(settings, data / "train_bpe" / "tokenizer.json")


def _before(stage: str, other: str) -> bool:
    return ORDER.index(stage) < ORDER.index(other)


def _device(stage: str, settings: Settings) -> Iterator[str]:
    """A precision that this machine does not compute, before anything is fetched for it."""
    precision, device = settings.numerics.precision, settings.runtime.device
    if precision == "fp32" or not _before(stage, "pretrain"):
        return
    from kernels.devices import gpu_visible

    if device == "cpu" or (device == "auto" and not gpu_visible()):
        yield f"pretrain: numerics.precision={precision} needs a GPU, and this machine shows none; set numerics.precision=fp32"


def _initial_model(stage: str, settings: Settings, root: Path) -> Iterator[str]:
    """A checkpoint to start with that is missing, or of another model."""
    folder = settings.pretrain.initial
    if folder is None or not _before(stage, "pretrain"):
        return
    try:
        theirs = dict(json.loads((root / folder / "model.json").read_bytes())["config"])
    except (OSError, ValueError, KeyError, TypeError):
        yield f"pretrain: pretrain.init_from: {folder} holds no checkpoint, model.json and weights; name a folder that does"
        return
    ours = settings.model.config(vocab_size=theirs["vocab_size"]).to_dict()
    if differing := [f"model.{key}={theirs[key]}" for key in theirs if theirs[key] != ours[key]]:
        yield f"pretrain: pretrain.init_from: {folder} has another model: set {' '.join(differing)}"


def _vocab_size(settings: Settings, tokenizer_path: Path) -> int:
    with suppress(
        FileNotFoundError, ValueError, KeyError, TypeError
    ):  # a damaged file is named by the stage that reads it
        return max(int(token["id"]) for token in json.loads(tokenizer_path.read_bytes())["added_tokens"]) + 1
    return settings.train_bpe.vocab_size


def _disk(stage: str, settings: Settings, root: Path) -> Iterator[str]:
    """Less room than the states to resume from and the checkpoints take, whatever else is written."""
    from kernels.parameters import flat_size, parameter_table

    if not _before(stage, "sft"):
        return
    config = settings.model.config(_vocab_size(settings, root / "data" / "train_bpe" / "tokenizer.json"))
    parameters = 4 * flat_size(parameter_table(config))
    kept = STATES + (settings.pretrain.schedule == "wsd")
    states, checkpoints = kept * 3 * parameters, 2 * parameters  # a state: parameters and two moments
    there = sum(path.stat().st_size for path in (root / ".nanoeuler" / "resume").glob("*/*.safetensors"))
    there += sum(path.stat().st_size for path in (root / "data").glob("*/checkpoint/*.safetensors"))
    free = shutil.disk_usage(root).free
    if states + checkpoints > free + there:
        needed, room = (states + checkpoints) / 1e9, (free + there) / 1e9
        yield (
            f"pretrain: {needed:.1f} GB are needed in {root.absolute()}, {states / 1e9:.1f} of them for resume states, "
            f"and {room:.1f} are free; make room there or choose a smaller model"
        )


def _windows(stage: str, settings: Settings, manifest: Path) -> Iterator[str]:
    """Text that cannot fill one window of the context: a byte gives one token at most, a document one more."""
    if not manifest.is_file() or not _before(stage, "pretrain"):
        return
    corpus, needed = json.loads(manifest.read_bytes())["corpus"], settings.model.context + 1
    for split in ("train", "val"):
        most = corpus[split]["bytes"] + corpus[split]["count"]
        if 0 < most < needed:
            yield (
                f"pretrain: the split {split} of corpus {corpus['name']} gives at most {most} tokens and needs {needed}, "
                "one window of model.context and its last target; give it more text or set a smaller model.context"
            )


def _prompts(stage: str, settings: Settings, tokenizer_path: Path) -> Iterator[str]:
    """Prompts of the report that the context does not hold whole: eval itself would cut them."""
    from stages.chat_template import render_prompt
    from stages.tokenizer import Tokenizer

    tokenizer, context = Tokenizer.load(tokenizer_path), settings.model.context
    sizes: list[tuple[str, int]] = []
    for number, text in enumerate(settings.eval.prompts):
        sizes.append((f"eval.prompts[{number}]", 1 + len(tokenizer.encode(text))))
    for number, text in enumerate(settings.eval.chat_prompts):
        sizes.append(
            (f"eval.chat_prompts[{number}]", len(render_prompt([{"role": "user", "content": text}], tokenizer)))
        )
    for name, size in sizes:
        if size > context:
            yield f"eval: {name} takes {size} tokens and model.context is {context}; shorten it or set model.context higher"


def _conversations(stage: str, settings: Settings, data: Path) -> Iterator[str]:
    """Conversations of which none fits the context."""
    if not _before(stage, "sft"):
        return
    from stages.chat_template import read_conversations
    from stages.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(data / "train_bpe" / "tokenizer.json")
    for split in ("train", "val"):
        path = data / "download" / f"conversations.{split}.jsonl.zst"
        if path.is_file() and not _some_fit(read_conversations(path), tokenizer, settings):
            yield (
                f"sft: no conversation of {path} fits model.context = {settings.model.context}; give shorter ones, or set "
                "model.context higher or sft.overflow: truncate"
            )


def _some_fit(conversations: Iterator[list[dict[str, str]]], tokenizer: Any, settings: Settings) -> bool:
    from stages.chat_template import render_all

    def fits(chunk: Sequence[list[dict[str, str]]]) -> bool:
        try:
            return bool(
                len(render_all(chunk, tokenizer, context=settings.model.context, overflow=settings.sft.overflow))
            )
        except ValueError:  # none is left
            return False

    chunks = iter(lambda: list(islice(conversations, CHUNK)), [])
    return any(fits(chunk) for chunk in chunks)


def _memory(settings: Settings, tokenizer_path: Path) -> Iterator[str]:
    """Micro-batches of sft and eval that do not fit the memory which pretrain's fits."""
    from kernels.devices import open_ops
    from kernels.memory import check_fits, plan

    if not tokenizer_path.is_file():
        return
    config = settings.model.config(_vocab_size(settings, tokenizer_path))
    ops = open_ops(settings.runtime.device, settings.numerics, threads=settings.runtime.threads)
    plans = {
        "sft": plan(
            config, settings.numerics, settings.sft.micro_batch, ops, optimizer=settings.sft.optimizer
        ),
        "eval": plan(config, settings.numerics, settings.eval.micro_batch, ops, training=False),
    }
    for name, planned in plans.items():
        try:
            check_fits(planned, getattr(settings, name).micro_batch, ops.memory_bytes())
        except ValueError as error:
            yield f"{name}: " + str(error).replace("memory: micro_batch", f"{name}.micro_batch", 1)
