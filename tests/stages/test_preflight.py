"""preflight: problems of later stages are reported early; runs without problems are not disturbed."""

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels import devices
from stages.preflight import objections
from stages.program import look_ahead
from stages.settings import Settings
from stages.text_files import RowWriter, atomic_file
from stages.trained_stages import STAGES

Make = Callable[..., Settings]
Usage = namedtuple("Usage", "total used free")


def write_talks(path: Path, answers: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as stream:
        writer = RowWriter(stream)
        for answer in answers:
            writer.write(
                {"messages": [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": answer}]}
            )
        writer.finish()


@pytest.fixture
def root(tmp_path: Path, corpus: Any) -> Path:
    """A repository in which download and train_bpe have run."""
    for split, path in (("train", corpus.train), ("val", corpus.val)):
        target = tmp_path / "data" / "download" / f"conversations.{split}.jsonl.zst"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    facts = {"name": "c", "train": {"bytes": 9000, "count": 8}, "val": {"bytes": 900, "count": 2}}
    (tmp_path / "data" / "download" / "manifest.json").write_text(
        json.dumps({"corpus": facts}), encoding="utf-8"
    )
    (tmp_path / "data" / "train_bpe").mkdir()
    shutil.copy(corpus.tokenizer, tmp_path / "data" / "train_bpe" / "tokenizer.json")
    return tmp_path


# A check that objects to a run that would pass stops everybody's work.
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_said_of_a_run_that_passes(root: Path, settings_with: Make, stage: str) -> None:
    assert list(objections(stage, settings_with(), root)) == []


# A tokenizer of text only: whoever pretrains by hand would be stopped by a template that only sft needs.
def test_a_tokenizer_without_the_chat_template(root: Path, settings_with: Make) -> None:
    path = root / "data" / "train_bpe" / "tokenizer.json"
    content = json.loads(path.read_bytes())
    kept = [token for token in content["added_tokens"] if token["content"] == "<|endoftext|>"]
    path.write_text(json.dumps({**content, "added_tokens": kept}), encoding="utf-8")
    (said,) = objections("pretrain", settings_with(), root)
    assert said.startswith("sft: ") and "<|pad|>, <|system|>, <|user|>, <|assistant|>, <|end|>" in said


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_said_before_there_are_files(tmp_path: Path, settings_with: Make, stage: str) -> None:
    """Would catch a check that fails before an earlier stage has run."""
    assert list(objections(stage, settings_with(), tmp_path)) == []


# The report would show a text that the model never read: generation cuts a prompt to the last half of the
# context.
def test_prompts_longer_than_the_context(root: Path, settings_with: Make) -> None:
    long = settings_with(
        "eval.prompts=['a', '" + "xyz " * 40 + "']", "eval.chat_prompts=['" + "xyz " * 40 + "']"
    )
    for stage in ("shard", "pretrain", "sft", "eval"):
        said = list(objections(stage, long, root))
        assert [line.split(" takes ")[0] for line in said] == [
            "eval: eval.prompts[1]",
            "eval: eval.chat_prompts[0]",
        ]


# sft would end in an error after all of pretraining.
@pytest.mark.parametrize("split", ["train", "val"])
def test_conversations_of_which_none_fits(root: Path, settings_with: Make, split: str) -> None:
    path = root / "data" / "download" / f"conversations.{split}.jsonl.zst"
    write_talks(path, ["far too long " * 30] * 600)
    for stage in ("shard", "pretrain"):
        (said,) = objections(stage, settings_with(), root)
        assert said.startswith(f"sft: no conversation of {path} fits model.context = 32; ")
    write_talks(path, ["far too long " * 30] * 600 + ["short"])
    assert list(objections("pretrain", settings_with(), root)) == []


# pretrain would end in an error after the vocabulary was learned and the text encoded.
@pytest.mark.parametrize(("size", "refused"), [(29, True), (30, False)])
def test_text_that_fills_no_window(root: Path, settings_with: Make, size: int, refused: bool) -> None:
    facts = {"name": "c", "train": {"bytes": 9000, "count": 8}, "val": {"bytes": size, "count": 3}}
    (root / "data" / "download" / "manifest.json").write_text(json.dumps({"corpus": facts}), encoding="utf-8")
    for stage in ("train_bpe", "shard"):
        said = list(objections(stage, settings_with(), root))
        assert len(said) == refused
        assert all("split val of corpus c has at most 32 tokens and needs 33" in line for line in said)


# The disk fills up hours later, at the first state; what a run has written already counts as room for it.
def test_less_room_than_states_and_checkpoints(
    root: Path, settings_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 900_000, 900_000))
    for stage in ("download", "train_bpe", "shard", "pretrain"):
        (said,) = objections(stage, settings_with(), root)
        assert "for resume states" in said and "free disk space" in said
    state = root / ".nanoeuler" / "resume" / "0" / "000000001-0.safetensors"
    state.parent.mkdir(parents=True)
    state.write_bytes(bytes(900_000))
    assert list(objections("pretrain", settings_with(), root)) == []


# The vocabulary and the shards would be made before pretrain finds no checkpoint, or one of another model.
def test_a_checkpoint_to_start_with(tmp_path: Path, settings_with: Make, corpus: Any) -> None:
    chosen = settings_with("pretrain.init_from=models/first")
    for stage in ("download", "train_bpe", "shard"):
        (said,) = objections(stage, chosen, tmp_path)
        assert said.startswith("pretrain: pretrain.init_from: models/first holds no checkpoint")
    folder = tmp_path / "models" / "first"
    folder.mkdir(parents=True)
    config = chosen.model.config(vocab_size=300)
    (folder / "model.json").write_text(json.dumps({"config": config.to_dict()}), encoding="utf-8")
    assert list(objections("download", chosen, tmp_path)) == []
    (said,) = objections(
        "download", settings_with("pretrain.init_from=models/first", "model.layers=3"), tmp_path
    )
    assert said == "pretrain: pretrain.init_from: models/first holds another model; set model.layers=2"


# 45 GB would be fetched and encoded before a machine without a GPU says that it has none.
@pytest.mark.parametrize(
    ("device", "visible", "refused"), [("auto", False, True), ("auto", True, False), ("cpu", True, True)]
)
def test_a_precision_that_the_machine_lacks(
    tmp_path: Path,
    settings_with: Make,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    visible: bool,
    refused: bool,
) -> None:
    monkeypatch.setattr(devices, "gpu_visible", lambda: visible)
    said = list(objections("download", settings_with("numerics=bf16", f"runtime.device={device}"), tmp_path))
    assert len(said) == refused and all("numerics.precision=bf16 needs a GPU" in line for line in said)


# sft or eval would find out after pretraining that their micro-batch does not fit.
def test_micro_batches_of_later_stages(
    root: Path, settings_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(device: str, numerics: Any, *, threads: int) -> Any:
        ops = real("cpu", numerics, threads=threads)
        planned = {"dtype": ops.dtype, "storage": ops.storage, "workspace_bytes": ops.workspace_bytes}
        return SimpleNamespace(**planned, memory_bytes=lambda: 10**7, norm_chunk=4096)

    real = devices.open_ops
    monkeypatch.setattr(devices, "open_ops", small)
    assert list(objections("pretrain", settings_with(), root)) == []
    said = list(objections("pretrain", settings_with("sft.micro_batch=4000", "eval.micro_batch=9000"), root))
    assert [line.split(" needs ")[0] for line in said] == [
        "sft: sft.micro_batch=4000",
        "eval: eval.micro_batch=9000",
    ]


# Under DVC the first stage has to fail, since the others follow; by hand one stage may be all that is wanted.
def test_a_run_of_dvc_is_refused_and_one_by_hand_is_told(
    root: Path, settings_with: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    long = settings_with("eval.prompts=['" + "xyz " * 40 + "']")
    monkeypatch.delenv("DVC_STAGE", raising=False)
    look_ahead("pretrain", long)
    assert capsys.readouterr().err.startswith(
        "note: `dvc repro` would stop here: eval: eval.prompts[0] takes "
    )
    monkeypatch.setenv("DVC_STAGE", "pretrain")
    with pytest.raises(
        ValueError, match=r"^eval: eval\.prompts\[0\] takes [0-9]+ tokens, but model\.context is 32"
    ):
        look_ahead("pretrain", long)
    look_ahead("pretrain", settings_with())
