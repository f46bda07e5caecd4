"""Faults of users and disks: the stage's main() prints one line that says what is wrong, where, and what to
do.

A small pipeline runs once. For each fault a copy of it is damaged in one place, and the stage that meets the
fault is started. The table holds the required parts of the message: file, key or value, what was expected,
what to do.
"""

import importlib
import json
import re
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree, rmtree

import pytest

from stages import params
from stages.overrides import compose
from stages.text_files import RowWriter, atomic_file
from stages.tokenizer import Tokenizer
from stages.trained_stages import STAGES, TRAINED_STAGES
from tests.scratch import write

ROOT = Path(__file__).resolve().parent.parent
SIZES = [
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=1",
    "model.dim=16",
    "model.ffn=16",
    "model.context=32",
]
LENGTHS = [f"{stage.name}.{key}" for stage in TRAINED_STAGES
           for key in ("steps=4", "micro_batch=2", "warmup_steps=1", "checkpoint_every=2")]  # fmt: skip
TINY = ["corpus=local", "conversations=local", "train_bpe.vocab_size=300", *SIZES, *LENGTHS, "eval.max_tokens=4",
        "runtime.device=cpu", "runtime.threads=1"]  # fmt: skip

Spoil = Callable[[Path], object]


def start(monkeypatch: pytest.MonkeyPatch, root: Path, stage: str, *argv: str) -> int:
    """Runs a stage's main() as `python -m stages.STAGE ARGV` in `root`; its exit code."""
    monkeypatch.chdir(root)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setattr(sys, "argv", [stage, *argv])
    try:
        importlib.import_module(f"stages.{stage}").main()
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        return stopped.code
    return 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every stage has run."""
    root = tmp_path_factory.mktemp("whole")
    params.write(root, compose(ROOT, TINY))
    write(root / "dvc.yaml", "")
    write(
        root / "texts" / "fox.txt",
        "".join(f"{n} quick brown foxes and {n * n} lazy dogs.\n" for n in range(300)),
    )
    talk = [{"prompt": f"Say {n}.", "completion": f"{n}!"} for n in range(100)]
    write(root / "conversations" / "talk.jsonl", "".join(json.dumps(row) + "\n" for row in talk))
    with pytest.MonkeyPatch.context() as patch:
        for stage in STAGES:
            assert start(patch, root, stage) == 0
    return root


def cut(name: str, by: int = 10) -> Spoil:
    """Takes the last bytes off a file."""
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:-by])


def text(name: str, content: str) -> Spoil:
    """Puts a text in a file's place."""
    return lambda root: write(root / name, content)


def data(name: str, content: bytes) -> Spoil:
    """Puts bytes in a file's place."""
    return lambda root: (root / name).write_bytes(content)


def gone(name: str) -> Spoil:
    """Removes a file."""
    return lambda root: (root / name).unlink()


def file_in_place_of(name: str) -> Spoil:
    """A file in place of a folder: nobody can write below it, not even root."""

    def spoil(root: Path) -> None:
        rmtree(root / name, ignore_errors=True)
        write(root / name, "")

    return spoil


def full(name: str) -> Spoil:
    """The disk is full when this file is written."""

    def spoil(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.partial").symlink_to("/dev/full")

    return spoil


def model(old: str, new: str) -> Spoil:
    """Edits the base model's description."""

    def spoil(root: Path) -> None:
        before = (root / MODEL).read_text(encoding="utf-8")
        assert old in before
        write(root / MODEL, before.replace(old, new))

    return spoil


def foreign_shard(root: Path) -> None:
    """A file of another kind under a shard's name."""
    (root / "data/shard/train_00000.bin").write_bytes(struct.pack("<256i", 7, *range(255)) + bytes(10000))


def other_tokenizer(root: Path) -> None:
    """A tokenizer that made neither shards nor checkpoints."""
    path = root / "data/train_bpe/tokenizer.json"
    Tokenizer.train(["another text"], 256 + 6, list(Tokenizer.load(path).special)).save(path)


def long_talk(root: Path) -> None:
    """One conversation, longer than the context."""
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because. " * 50}]
    with atomic_file(root / "data/download/conversations.train.jsonl.zst") as stream:
        writer = RowWriter(stream)
        writer.write({"messages": turns})
        writer.finish()


WEIGHTS, MODEL = "data/pretrain/checkpoint/weights.safetensors", "data/pretrain/checkpoint/model.json"
WRITTEN = r"cannot be written: .*; make room there or give this user the right"
FAULTS: dict[str, tuple[str, Spoil | None, list[str], str]] = {
    # The configuration; more in tests/stages/test_settings.py.
    "unknown key": ("pretrain", None, ["pretrain.stepz=3"], "unknown key pretrain.stepz; did you mean pretrain.steps"),
    "ill-typed": ("shard", None, ["shard.tokens_per_shard=many"], "shard.tokens_per_shard: expected a whole number, got 'many'"),
    "lr of nan": ("pretrain", None, ["pretrain.lr=nan"], "pretrain.lr: expected a finite number, got nan"),
    "heads": ("pretrain", None, ["model.heads=3"], "model.dim: expected a multiple of model.heads = 3, got 16"),
    "kv_heads": ("pretrain", None, ["model.kv_heads=3"], "model.heads: expected a multiple of model.kv_heads = 3, got 2"),
    "context 0": ("pretrain", None, ["model.context=0"], "model.context: expected at least 1, got 0"),
    "vocabulary": ("train_bpe", None, ["train_bpe.vocab_size=70000"], "train_bpe.vocab_size: expected 262 .* to 65536 .*70000"),
    # Texts.
    "no text": ("download", gone("texts/fox.txt"), [], "texts/.*: no such file; paths are relative to"),
    "empty text": ("download", text("texts/fox.txt", " \n"), [], "every text is empty or left out"),
    "broken line": ("download", text("texts/x.jsonl", '{"text": "a"}\n{"te'), [], "x.jsonl, line 2: expected one JSON object"),
    "not UTF-8": ("download", data("texts/x.txt", b"abc\xff"), [], "x.txt: not UTF-8 at byte 3; convert the file"),
    "cut text": ("train_bpe", cut("data/download/train.jsonl.zst"), [], "train.jsonl.zst: .*(cut off|damaged)"),
    "no text for val": ("shard", gone("data/download/val.jsonl.zst"), [], "val.jsonl.zst: no such file; run the stage"),
    "too few merges": ("train_bpe", None, ["train_bpe.vocab_size=60000"], "train_bpe.vocab_size: .*got 60000"),
    # Tokenizer and shards.
    "cut tokenizer": ("shard", cut("data/train_bpe/tokenizer.json"), [], "tokenizer.json: expected JSON.*dvc repro train_bpe"),
    "cut shard": ("pretrain", cut("data/shard/train_00000.bin"), [], "train_00000.bin: expected .* bytes for .*dvc repro shard"),
    "foreign shard": ("pretrain", foreign_shard, [], "train_00000.bin: expected magic number 20240520, found 7.*dvc repro shard"),
    "no index": ("pretrain", gone("data/shard/index.json"), [], "index.json: not found.*dvc repro shard"),
    "foreign shards": ("pretrain", other_tokenizer, [], "index.json: expected shards of tokenizer .*found those of .*dvc repro"),
    "one window": ("pretrain", None, ["model.context=1000"], "split val has .* tokens and needs 1001, .*smaller model.context"),
    # Checkpoints.
    "no weights": ("sft", gone(WEIGHTS), [], f"{WEIGHTS}: expected a file of a checkpoint, found none; run `make repro`"),
    "cut weights": ("sft", cut(WEIGHTS), [], f"{WEIGHTS}: incomplete or edited: .*sha256 .*model.json; run `make repro`"),
    "cut model.json": ("sft", cut(MODEL), [], f"{MODEL}: incomplete or edited .*; run `make repro`"),
    "list for model.json": ("sft", text(MODEL, "[]"), [], f"{MODEL}: incomplete or edited .*; run `make repro`"),
    "edited model.json": ("sft", model('"heads": 2', '"heads": 1'), [], f"{MODEL}: incomplete or edited .*; run `make repro`"),
    "foreign checkpoint": ("sft", other_tokenizer, [], "checkpoint: trained with tokenizer .*the one given is .*, or run"),
    "foreign checkpoint, eval": ("eval", other_tokenizer, [], "checkpoint: trained with tokenizer .*the one given is .*, or run"),
    # Training.
    "long conversations": (
        "sft", long_talk, [],
        "no conversation is left of 1: 1 are longer than model.context = 32.* or sft.overflow: truncate",
    ),
    "not finite": (
        "pretrain", None, ["pretrain.lr=1e30"],
        "step [234]: loss .*, learning rate 1e.30, gradient norm .*, first bad tensor .*weight: not finite; "
        "last good resume state .*; start over with a lower lr or a longer warm-up",
    ),
    # The disk. A file in place of a folder simulates a read-only folder, which root could write to.
    "checkout": ("shard", file_in_place_of(".nanoeuler"), [], f".nanoeuler: {WRITTEN}"),
    "read-only, download": ("download", file_in_place_of("data/download"), [], f"data/download/manifest.json: {WRITTEN}"),
    "read-only, shard": ("shard", file_in_place_of("data/shard"), [], f"data/shard: {WRITTEN}"),
    "read-only, pretrain": ("pretrain", file_in_place_of("data/pretrain"), [], f"data/pretrain/.*: {WRITTEN}"),
    "read-only, sft": ("sft", file_in_place_of("data/sft"), [], f"data/sft/.*: {WRITTEN}"),
    "read-only, eval": ("eval", file_in_place_of("data/eval"), [], f"data/eval/metrics.json: {WRITTEN}"),
    "full, download": ("download", full("data/download/val.jsonl.zst"), [], f"data/download/val.jsonl.zst: {WRITTEN}"),
    "full, train_bpe": ("train_bpe", full("data/train_bpe/tokenizer.json"), [], f"data/train_bpe/tokenizer.json: {WRITTEN}"),
    "full, shard": ("shard", full("data/shard/index.json"), [], f"data/shard/index.json: {WRITTEN}"),
    "full, pretrain": ("pretrain", full("data/pretrain/curves/val.csv"), [], f"data/pretrain/curves/val.csv: {WRITTEN}"),
    "full, sft": ("sft", full("data/sft/checkpoint/model.json"), [], f"data/sft/checkpoint/model.json: {WRITTEN}"),
    "full, eval": ("eval", full("data/eval/report.md"), [], f"data/eval/report.md: {WRITTEN}"),
}  # fmt: skip


# A traceback, a message that leaves its reader to search, or exit code 0, which DVC takes for success.
@pytest.mark.parametrize("fault", FAULTS)
def test_one_line_says_what_is_wrong(
    whole: Path,
    tmp_path: Path,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stage, spoil, argv, message = FAULTS[fault]
    if fault.startswith("full") and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    root = tmp_path / "spoilt"
    copytree(whole, root)
    if spoil:
        spoil(root)
    code = start(monkeypatch, root, stage, *argv)
    lines = capfd.readouterr().err.splitlines()
    assert code == 1 and len(lines) == 1, lines
    assert re.search(f"^error: .*{message}", lines[0]), lines[0]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to let a file grow beyond so many bytes, as a full disk or a quota does."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# An incomplete shard, state or model that is used; a good state that is lost together with the new one.
@pytest.mark.parametrize(
    ("stage", "size", "trained", "message"),
    [
        ("shard", 3000, False, r"data/shard/train_00000\.bin"),
        ("pretrain", 20000, False, r"\.nanoeuler/resume/\w+/000000002\.partial"),
        ("sft", 20000, True, "data/sft/checkpoint/weights.safetensors"),
    ],
)
def test_a_disk_that_fills_up_on_the_way(
    whole: Path, tmp_path: Path, stage: str, size: int, trained: bool, message: str,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    root = tmp_path / "full"
    copytree(whole, root)
    rmtree(root / "data" / stage)
    states = list((root / ".nanoeuler" / "resume").rglob("*.safetensors")) if trained else []
    if not trained:
        rmtree(root / ".nanoeuler")
    with files_of_at_most(size):
        code = start(monkeypatch, root, stage)
    lines = capfd.readouterr().err.splitlines()
    assert code == 1 and len(lines) == 1 and re.search(f"^error: .*{message}: {WRITTEN}", lines[0]), lines
    assert sorted((root / ".nanoeuler" / "resume").rglob("*.safetensors")) == sorted(states)
    assert not [*root.rglob("*.partial"), *(root / "data" / stage).rglob("*.safetensors")]
    assert start(monkeypatch, root, stage) == 0  # once there is room
    assert ("resumed at step 4 " in capfd.readouterr().out) == trained
