"""Look-ahead: what a later stage would refuse is found when a stage starts, before an expensive stage runs
for nothing.

Each check reads parameters only, or files that earlier stages have written. settings.py validates each
section; the checks here need several sections, the data or the machine. A check reads as little as possible:
the manifest, the tokenizer, conversations up to the first that fits.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from stages.settings import Settings
from stages.special_tokens import NEEDED
from stages.trained_stages import STAGES, TRAINED_STAGES

CHUNK = 256  # conversations rendered in one call, until one fits
STATES = 3  # resume states on the disk at once: the two newest and the one being written; one more with wsd
FIRST_TRAINED, *LATER_TRAINED = (stage.name for stage in TRAINED_STAGES)


def objections(stage: str, settings: Settings, root: Path = Path()) -> Iterator[str]:
    """One line for each problem that a stage after `stage` would report; each names the stage, the key and
    what to set.

    Args:
        stage: the stage that starts.
        settings: all sections.
        root: of the repository.
    """
    data = root / "data"
    tokenizer_path = data / "train_bpe" / "tokenizer.json"
    yield from _device(stage, settings)
    yield from _initial_model(stage, settings, root)
    yield from _disk(stage, settings, root)
    if _before("download", stage):
        yield from _windows(stage, settings, data / "download" / "manifest.json")
    if _before("train_bpe", stage) and tokenizer_path.is_file():
        if missing := _missing_tokens(tokenizer_path):
            yield (
                f"sft: {tokenizer_path} has no special token {', '.join(missing)}; add what is missing to "
                "train_bpe.special_tokens and run `make repro`"
            )
        else:
            yield from _prompts(settings, tokenizer_path)
            yield from _conversations(stage, settings, data)
    if stage == FIRST_TRAINED:
        yield from _memory(settings, tokenizer_path)


def _before(stage: str, other: str) -> bool:
    return STAGES.index(stage) < STAGES.index(other)


def _device(stage: str, settings: Settings) -> Iterator[str]:
    """A precision that this machine does not support, before anything is downloaded for it."""
    precision, device = settings.numerics.precision, settings.runtime.device
    if precision == "fp32" or not _before(stage, FIRST_TRAINED):
        return
    from kernels.devices import gpu_visible

    if device == "cpu" or (device == "auto" and not gpu_visible()):
        yield (
            f"pretrain: numerics.precision={precision} needs a GPU, and none is visible; set "
            "numerics.precision=fp32"
        )


def _initial_model(stage: str, settings: Settings, root: Path) -> Iterator[str]:
    """A checkpoint for the initial weights that is missing, or holds another model."""
    folder = settings.pretrain.initial
    if folder is None or not _before(stage, "pretrain"):
        return
    try:
        theirs = dict(json.loads((root / folder / "model.json").read_bytes())["config"])
    except (OSError, ValueError, KeyError, TypeError):
        yield (
            f"pretrain: pretrain.init_from: {folder} holds no checkpoint; set it to a folder "
            "with model.json and the weights"
        )
        return
    ours = settings.model.config(vocab_size=theirs["vocab_size"]).to_dict()
    if differing := [f"model.{key}={theirs[key]}" for key in theirs if theirs[key] != ours[key]]:
        yield f"pretrain: pretrain.init_from: {folder} holds another model; set {' '.join(differing)}"


def _vocab_size(settings: Settings, tokenizer_path: Path) -> int:
    with suppress(
        FileNotFoundError, ValueError, KeyError, TypeError
    ):  # the stage that reads a damaged file names it
        return max(int(token["id"]) for token in json.loads(tokenizer_path.read_bytes())["added_tokens"]) + 1
    return settings.train_bpe.vocab_size


def _disk(stage: str, settings: Settings, root: Path) -> Iterator[str]:
    """Too little free disk for the resume states and the checkpoints, whatever else is written."""
    from kernels.parameters import flat_size, parameter_table

    if _before(FIRST_TRAINED, stage):
        return
    config = settings.model.config(_vocab_size(settings, root / "data" / "train_bpe" / "tokenizer.json"))
    parameters = 4 * flat_size(parameter_table(config))
    kept = STATES + (settings.pretrain.schedule == "wsd")
    states, checkpoints = (
        kept * 3 * parameters,
        len(TRAINED_STAGES) * parameters,
    )  # a state: parameters, two moments
    there = sum(path.stat().st_size for path in (root / ".nanoeuler" / "resume").glob("*/*.safetensors"))
    there += sum(path.stat().st_size for path in (root / "data").glob("*/checkpoint/*.safetensors"))
    free = shutil.disk_usage(root).free
    if states + checkpoints > free + there:
        needed, room = (states + checkpoints) / 1e9, (free + there) / 1e9
        yield (
            f"pretrain: needs {needed:.1f} GB in {root.absolute()}, {states / 1e9:.1f} GB of them for resume "
            f"states, but {room:.1f} GB are free; free disk space or choose a smaller model"
        )


def _windows(stage: str, settings: Settings, manifest: Path) -> Iterator[str]:
    """A split that cannot fill one window: a byte gives at most one token, and a document one more."""
    if not manifest.is_file() or not _before(stage, "pretrain"):
        return
    corpus, needed = json.loads(manifest.read_bytes())["corpus"], settings.model.context + 1
    for split in ("train", "val"):
        max_tokens = corpus[split]["bytes"] + corpus[split]["count"]
        if 0 < max_tokens < needed:
            yield (
                f"pretrain: split {split} of corpus {corpus['name']} has at most {max_tokens} tokens and "
                f"needs {needed}, "
                "one window of model.context and its last target; add text or set a smaller model.context"
            )


def _missing_tokens(tokenizer_path: Path) -> list[str]:
    """The special tokens of the chat template that a tokenizer lacks; pretraining needs none of them."""
    from stages.tokenizer import Tokenizer

    special = Tokenizer.load(tokenizer_path).special
    return [token for token in NEEDED if token not in special]


def _prompts(settings: Settings, tokenizer_path: Path) -> Iterator[str]:
    """Prompts of the report that are longer than the context: eval itself would cut them."""
    from stages.chat_template import render_prompt
    from stages.tokenizer import Tokenizer

    tokenizer, context = Tokenizer.load(tokenizer_path), settings.model.context
    sizes: list[tuple[str, int]] = []
    for number, text in enumerate(settings.eval.prompts):
        sizes.append((f"eval.prompts[{number}]", 1 + len(tokenizer.encode(text))))
    for number, text in enumerate(settings.eval.chat_prompts):
        prompt = render_prompt([{"role": "user", "content": text}], tokenizer)
        sizes.append((f"eval.chat_prompts[{number}]", len(prompt)))
    for name, size in sizes:
        if size > context:
            yield (
                f"eval: {name} takes {size} tokens, but model.context is {context}; shorten it "
                "or set a larger model.context"
            )


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
                f"sft: no conversation of {path} fits model.context = {settings.model.context}; use shorter "
                "ones, or set a larger model.context or sft.overflow: truncate"
            )


def _some_fit(conversations: Iterator[list[dict[str, str]]], tokenizer: Any, settings: Settings) -> bool:
    from stages.chat_template import render_all

    context, overflow = settings.model.context, settings.sft.overflow

    def fits(chunk: Sequence[list[dict[str, str]]]) -> bool:
        try:
            return bool(len(render_all(chunk, tokenizer, context=context, overflow=overflow)))
        except ValueError:  # none is left
            return False

    chunks = iter(lambda: list(islice(conversations, CHUNK)), [])
    return any(fits(chunk) for chunk in chunks)


def _memory(settings: Settings, tokenizer_path: Path) -> Iterator[str]:
    """Micro-batches of the stages after pretrain that do not fit the memory."""
    from kernels.devices import open_ops
    from kernels.memory import check_fits, plan_of_rank
    from stages.ranks.gpus import training_rank_count

    if not tokenizer_path.is_file():
        return
    config, numerics = settings.model.config(_vocab_size(settings, tokenizer_path)), settings.numerics
    ops = open_ops(settings.runtime.device, numerics, threads=settings.runtime.threads)
    plans = {}
    for name in LATER_TRAINED:
        section = getattr(settings, name)
        optimizer, ranks = section.make_optimizer(), training_rank_count(settings.runtime, section)
        sizes, sharded = (config, numerics, section.micro_batch, ops), settings.runtime.shard_optimizer
        _, plans[name] = plan_of_rank(*sizes, optimizer, ranks=ranks, sharded=sharded)
    _, plans["eval"] = plan_of_rank(config, numerics, settings.eval.micro_batch, ops, None)
    for name, planned in plans.items():
        try:
            check_fits(planned, getattr(settings, name).micro_batch, ops.memory_bytes())
        except ValueError as error:
            yield f"{name}: " + str(error).replace("memory: micro_batch", f"{name}.micro_batch", 1)
