"""A day's work with one's own text, step by step in one checkout: each step trains on what a person would
expect. Slow.

What was trained on is told by the manifest's digest of the text, and by the bytes of text that the shards
count.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from stages.text_files import read_rows
from stages.tokenizer import Tokenizer
from tests.scratch import TINY, Copy, make_copy, write

pytestmark = pytest.mark.slow

POEMS = """
name: poems
local_path: poems
sources:
  - {kind: local, files: ["poems/*.txt"], license: mine}
validation: {tail: 0.2}
"""


def story(name: str, lines: int) -> str:
    return "".join(f"{name} went out on day {day} and counted {day * day} stars.\n" for day in range(lines))


def train(repo: Copy, *arguments: str) -> list[str]:
    """`dvc repro`, or another dvc command that runs the pipeline; the stages whose command ran."""
    output = repo.dvc(*(arguments or ("repro",)))
    return [line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage")]


def trained_on(repo: Copy) -> str:
    """All text of the corpus as the pipeline has it, held-out parts behind the rest; checked to be what was
    trained on.
    """
    manifest = json.loads((repo.root / "data/download/manifest.json").read_text(encoding="utf-8"))["corpus"]
    index = json.loads((repo.root / "data/shard/index.json").read_text(encoding="utf-8"))["splits"]
    parts: dict[str, list[str]] = {}
    for split in ("train", "val"):
        rows = [row for _, row in read_rows(repo.root / f"data/download/{split}.jsonl.zst")]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        assert manifest[split]["text_sha256"] == hashlib.sha256(lines.encode()).hexdigest()
        assert index[split]["bytes"] == sum(len(row["text"].encode()) for row in rows)
        for row in rows:
            parts.setdefault(row["source"], []).append(row["text"])
    return "".join("".join(parts[name]) for name in sorted(parts))


def texts(repo: Copy, folder: str = "texts") -> str:
    """The text that lies in a folder now."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted((repo.root / folder).glob("*.txt")))


def params(repo: Copy) -> dict[str, Any]:
    return dict(yaml.safe_load((repo.root / "params.yaml").read_text(encoding="utf-8")))


def conversations(repo: Copy) -> list[list[dict[str, str]]]:
    paths = [repo.root / f"data/download/conversations.{split}.jsonl.zst" for split in ("train", "val")]
    return [row["messages"] for path in paths for _, row in read_rows(path)]


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    """A checkout with three small files of text, which git does not know, and a second corpus."""
    repo = make_copy(tmp_path_factory.mktemp("day"), TINY)
    repo.git("rm", "-r", "--quiet", "--cached", "texts", "conversations")
    rmtree(repo.root / "texts")
    for name in ("anna", "bert", "cleo"):
        write(repo.root / "texts" / f"{name}.txt", story(name, 60))
    write(repo.root / "poems" / "moon.txt", story("the moon", 90))
    write(repo.root / "conf" / "corpus" / "poems.yaml", "# Poems." + POEMS)
    repo.git("add", "conf")
    repo.git("commit", "--quiet", "-m", "poems")
    yield repo


# One story, in the order of the day: each step starts from what the one before has left, as a person's
# checkout does.
def test_a_day_with_own_text(day: Copy) -> None:
    repo, python = day, sys.executable
    anna = repo.root / "texts" / "anna.txt"

    assert train(repo) == ["download", "train_bpe", "shard", "pretrain", "sft", "eval"]
    assert trained_on(repo) == texts(repo)
    assert train(repo) == []
    first = texts(repo)

    write(repo.root / "texts" / "dora.txt", story("dora", 70))  # more text, no flag
    assert train(repo)[:4] == ["download", "train_bpe", "shard", "pretrain"]
    assert trained_on(repo) == texts(repo) != first

    write(anna, story("anna the second", 60))  # a change
    assert "download" in train(repo)
    changed = trained_on(repo)
    assert changed == texts(repo) and "anna the second" in changed

    assert "download" in train(repo, "exp", "run", "-S", "corpus=poems")  # another experiment
    assert trained_on(repo) == texts(repo, "poems")
    write(anna, story("anna the third", 60))  # meanwhile
    assert "pretrain" in train(repo, "exp", "run")  # and back
    assert trained_on(repo) == texts(repo) and "anna the third" in texts(repo)

    write(
        anna, story("anna the second", 60)
    )  # the older text again: out of the run cache, and it is that text
    assert train(repo) == []
    assert trained_on(repo) == changed

    repo.git("add", "dvc.lock", "data")
    repo.git("commit", "--quiet", "-m", "run")
    write(anna, story("anna the fourth", 60))
    train(repo)
    repo.git("stash", "--quiet")  # puts an older dvc.lock and older curves in place of these
    assert train(repo) == []
    assert trained_on(repo) == texts(repo) and "anna the fourth" in texts(repo)
    repo.git("stash", "drop", "--quiet")

    repo.run(
        python, "-m", "stages.params", "--write", "pretrain.steps=5", "train_bpe.vocab_size=310"
    )  # kept ...
    assert "pretrain" in train(repo, "exp", "run", "-S", "sft.steps=2")  # ... also here
    now = params(repo)
    assert (now["pretrain"]["steps"], now["train_bpe"]["vocab_size"], now["sft"]["steps"]) == (5, 310, 2)
    assert now["corpus"]["name"] == "local" and trained_on(repo) == texts(repo)


# Chats of three shapes, with rows that are none: what can be read is trained on, the rest is counted and
# named.
def test_own_chats(day: Copy) -> None:
    repo, folder = day, day.root / "conversations"
    rmtree(folder)
    rows: list[dict[str, Any]] = [{"prompt": f"Ask {n}?", "completion": f"Say {n}."} for n in range(40)]
    rows += [
        {"conversations": [{"from": "human", "value": f"hi {n}"}, {"from": "gpt", "value": f"ho {n}"}]}
        for n in range(40)
    ]
    bad = [
        {"prompt": "no answer"},
        {"messages": [{"role": "king", "content": "x"}]},
        {"messages": 7},
        {"other": 1},
    ]
    write(folder / "talk.jsonl", "".join(json.dumps(row) + "\n" for row in [*rows, *bad]))
    items = [{"instruction": f"Do {n}", "input": "", "output": f"Done {n}" if n else " "} for n in range(40)]
    write(folder / "alpaca_data.json", json.dumps(items))
    assert "sft" in train(repo)
    assert len(conversations(repo)) == 40 + 40 + 39
    left_out = json.loads((repo.root / "data/download/manifest.json").read_text(encoding="utf-8"))[
        "conversations"
    ]["left_out"]
    assert (left_out["bad_rows"], left_out["empty"]) == (4, 1)

    write(
        folder / "talk.jsonl", "".join(json.dumps(row) + "\n" for row in rows[:50])
    )  # a change is noticed here too
    assert "download" in train(repo)
    assert len(conversations(repo)) == 50 + 39


# Going on from a finished model, on the changed text; then a chat with a system message.
def test_go_on_training_and_talk(day: Copy) -> None:
    repo = day
    copytree(repo.root / "data/pretrain/checkpoint", repo.root / "models" / "first")
    assert (
        train(repo, "exp", "run", "-S", "pretrain.init_from=models/first", "-S", "pretrain.seed=2")[0]
        == "pretrain"
    )
    assert params(repo)["pretrain"]["init_from"] == "models/first"
    assert trained_on(repo) == texts(repo)
    command = [
        sys.executable,
        "-m",
        "stages.chat",
        "--system",
        "Say no.",
        "--prompt",
        "hi 1",
        "--max-tokens",
        "3",
        "--seed",
        "1",
    ]
    repo.run(*command)


# A vocabulary or a dataset's folder that is replaced under the same name: the old one came back as up to
# date.
def test_a_taken_tokenizer_and_a_dataset_folder_are_watched(day: Copy) -> None:
    repo = day
    hub = "name: hub\nlocal_path: sets/own\nsources:\n  - {kind: hf, dataset: sets/own, split: train}\n"
    write(
        repo.root / "conf" / "corpus" / "hub.yaml",
        f"# A dataset's folder.\n{hub}validation: {{fraction: 0.2}}\n",
    )
    parquet, taken = (
        repo.root / "sets" / "own" / "train-00000.parquet",
        repo.root / "words" / "tokenizer.json",
    )

    def make(word: str) -> None:
        parquet.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {"text": f"{word} {number} and so on, for a while, to fill the line. " * 4}
            for number in range(200)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)

    def learn(word: str) -> None:
        special = params(repo)["train_bpe"]["special_tokens"]
        Tokenizer.train([f"{word} and so on"], 270, special).save(taken)

    make("first")
    learn("first")
    run = [
        "exp",
        "run",
        "-S",
        "kept=none",
        "-S",
        "corpus=hub",
        "-S",
        "train_bpe.pretrained=words/tokenizer.json",
    ]
    assert train(repo, *run)[:3] == ["download", "train_bpe", "shard"]
    assert "first 7 and so on" in trained_on(repo)
    make("second")
    assert "download" in train(repo, *run)
    assert "second 7 and so on" in trained_on(repo) and "first" not in trained_on(repo)
    learn("other")
    assert train(repo, *run)[:2] == ["train_bpe", "shard"]
    assert (repo.root / "data/train_bpe/tokenizer.json").read_bytes() == taken.read_bytes()
    make("first")
    learn("first")
    assert train(repo, *run) == []
    assert "first 7 and so on" in trained_on(repo)


# What a person asks for is refused where nobody could see that it would not hold.
def test_text_outside_the_watched_folder(day: Copy, tmp_path: Path) -> None:
    write(tmp_path / "away.txt", story("away", 50))
    sources = f"corpus.sources=[{{kind: local, files: ['{tmp_path}/*.txt']}}]"
    done = day.fail(sys.executable, "-m", "stages.download", "corpus=local", sources)
    assert (
        "lies outside corpus.local_path = texts, where DVC looks for changes; set "
        f"corpus.local_path={tmp_path}" in done
    )
