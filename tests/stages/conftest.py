"""A corpus of a few sentences with its tokenizer, shards and conversations, for the stages that train and
measure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from stages.overrides import compose
from stages.settings import Settings, validate
from stages.shard_format import Counts, shard_path
from stages.shard_writer import clear, write_index, write_shard
from stages.text_files import RowWriter, atomic_file
from stages.tokenizer import Tokenizer
from stages.trained_stages import TRAINED_STAGES

ROOT = Path(__file__).resolve().parent.parent.parent
SPECIAL = ("<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
NOUNS = ("king", "queen", "night", "crown", "sword", "daughter")
VERBS = ("loves", "fears", "seeks", "forgets")


@dataclass(frozen=True)
class Corpus:
    """Paths of what the stages before pretrain write."""

    folder: Path
    tokenizer: Path
    shards: Path
    train: Path
    val: Path


def sentences(seed: int, count: int) -> str:
    """Text with an easy grammar: whoever is named first comes again at the end."""
    rng = np.random.default_rng(seed)
    rows = [(rng.choice(NOUNS), rng.choice(VERBS), rng.choice(NOUNS)) for _ in range(count)]
    return "".join(f"The {one} {verb} the {other}, says the {one}.\n" for one, verb, other in rows)


def talks(seed: int, count: int) -> list[list[dict[str, str]]]:
    """Questions with an answer that repeats the noun asked for."""
    rng = np.random.default_rng(seed)
    pairs = [(str(rng.choice(NOUNS)), str(rng.choice(VERBS))) for _ in range(count)]
    return [
        [
            {"role": "user", "content": f"Who {verb} the {noun}?"},
            {"role": "assistant", "content": f"The {noun}."},
        ]
        for noun, verb in pairs
    ]


def write_shards(folder: Path, tokenizer: Tokenizer, texts: dict[str, list[str]]) -> None:
    """One shard a split, as the stage shard writes them."""
    clear(folder)
    counts = {}
    for split, documents in texts.items():
        parts = [
            np.append(np.int32(tokenizer.special[SPECIAL[0]]), tokenizer.encode(document))
            for document in documents
        ]
        ids = np.concatenate(parts)
        file = write_shard(shard_path(folder, split, 0), ids, tokenizer.vocab_size)
        counts[split] = Counts(
            len(ids), sum(len(document.encode()) for document in documents), len(documents), [file]
        )
    write_index(folder, tokenizer_sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size, splits=counts)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The corpus, written once for all tests."""
    folder = tmp_path_factory.mktemp("corpus")
    made = Corpus(
        folder, folder / "tokenizer.json", folder / "shard", folder / "train.zst", folder / "val.zst"
    )
    texts = {
        "train": [sentences(seed, 40) for seed in range(8)],
        "val": [sentences(seed, 12) for seed in (90, 91)],
    }
    tokenizer = Tokenizer.train(texts["train"], 256 + 24 + len(SPECIAL), SPECIAL)
    tokenizer.save(made.tokenizer)
    write_shards(made.shards, tokenizer, texts)
    for path, seed, count in ((made.train, 1, 60), (made.val, 2, 20)):
        with atomic_file(path) as stream:
            writer = RowWriter(stream)
            for talk in talks(seed, count):
                writer.write({"messages": talk})
            writer.finish()
    return made


@pytest.fixture(scope="session")
def settings_with() -> Callable[..., Settings]:
    """The smoke experiment's settings with further overrides: settings_with("pretrain.steps=3")."""
    sizes = [
        "model.dim=16",
        "model.heads=2",
        "model.kv_heads=1",
        "model.ffn=24",
        "model.context=32",
        "eval.micro_batch=4",
    ]
    lengths = [
        f"{stage.name}.{key}"
        for stage in TRAINED_STAGES
        for key in ("micro_batch=4", "steps=6", "checkpoint_every=2")
    ]
    fixed = [
        "+experiment=smoke",
        *sizes,
        *lengths,
        "runtime.device=cpu",
        "runtime.threads=1",
        "runtime.display=plain",
    ]
    return lambda *overrides: validate(compose(ROOT, [*fixed, *overrides]))
