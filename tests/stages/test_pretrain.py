"""The stage pretrain, small: correct outputs and figures, the same bytes however often it was stopped."""

import csv
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from kernels.batch import Batch
from kernels.config import Numerics
from kernels.engine import Engine
from stages import checkpoint, pretrain
from stages.batches import PretrainBatches
from stages.program import command_main
from stages.settings import Settings
from stages.shard_format import read_shard
from stages.tokenizer import Tokenizer

Make = Callable[..., Settings]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume states go to the current folder, or to DVC's root if that is set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)


def run(corpus: Any, settings: Settings, name: str = "out") -> Path:
    """Runs the stage into a folder of the current one; returns that."""
    folder = Path(name)
    outs: dict[str, Any] = {
        out.partition(".")[0]: folder / out for out in ("checkpoint", "samples.txt", "curves", "speed.csv")
    }
    pretrain.run(settings, tokenizer_path=corpus.tokenizer, shards=corpus.shards, **outs)
    return folder


def stopped_at(monkeypatch: pytest.MonkeyPatch, index: int, stop: Callable[[], None]) -> None:
    """Makes the data call `stop` once, when micro-batch `index` is read."""
    batch, pending = PretrainBatches.batch, [index]

    def stopping(self: PretrainBatches, asked: int) -> Batch:
        if pending and asked == pending[0]:
            pending.clear()
            stop()
        return batch(self, asked)

    monkeypatch.setattr(PretrainBatches, "batch", stopping)


def kill() -> None:
    raise SystemExit("killed")


def test_stage_writes_model_curves_and_samples(corpus: Any, settings_with: Make) -> None:
    """Would catch an out that is missing or incomplete, a curve without its end, and a model that did not
    learn.
    """
    out = run(corpus, settings_with("pretrain.steps=40", "pretrain.val_every=20"))
    tokenizer = Tokenizer.load(corpus.tokenizer)
    loaded = checkpoint.load(out / "checkpoint", tokenizer.sha256)
    assert loaded.config == settings_with().model.config(tokenizer.vocab_size)
    with (out / "curves" / "train.csv").open(encoding="utf-8") as file:
        train = list(csv.DictReader(file))
    with (out / "curves" / "val.csv").open(encoding="utf-8") as file:
        val = list(csv.DictReader(file))
    assert [int(row["step"]) for row in train] == list(range(1, 41)) and [
        int(row["step"]) for row in val
    ] == [20, 40]
    assert float(train[-1]["loss"]) < float(train[0]["loss"]) - 0.5
    assert float(train[0]["loss"]) == pytest.approx(math.log(tokenizer.vocab_size), rel=0.1)
    provenance = json.loads(
        next(Path(".nanoeuler/runs").glob("pretrain-*/provenance.json")).read_text(encoding="utf-8")
    )
    assert (
        provenance["device"] == "cpu"
        and provenance["parameters"]["pretrain"]["steps"] == 40
        and provenance["seconds"] > 0
    )
    assert (out / "samples.txt").read_text(encoding="utf-8").count("=== step") == 4
    speed = (out / "speed.csv").read_bytes()
    assert speed.startswith(b"step,tokens_per_s\n1,") and speed.count(b"\n") == 41
    assert speed == next(Path(".nanoeuler/runs").glob("pretrain-*/speed.csv")).read_bytes()


def test_bits_per_byte_are_those_of_every_token(corpus: Any, settings_with: Make) -> None:
    """Would catch a validation that skips the last window, counts padding, or divides by tokens or
    characters.

    The sum over other batches of the same windows differs by rounding of the single losses only: 1e-5 of it.
    """
    out = run(corpus, settings_with())
    with (out / "curves" / "val.csv").open(encoding="utf-8") as file:
        told = float(list(csv.DictReader(file))[-1]["val_bpb"])
    model = checkpoint.load(out / "checkpoint")
    engine = Engine(model.config, Numerics(), micro_batch=1, device="cpu", threads=1, training=False)
    engine.load(model.weights)
    tokenizer, ids = (
        Tokenizer.load(corpus.tokenizer),
        read_shard(corpus.shards / "val_00000.bin").astype(np.int32),
    )
    nats = 0.0
    for start in range(0, len(ids) - 1, model.config.context):
        row = ids[start : start + model.config.context + 1]
        document = np.cumsum(row[:-1] == tokenizer.special["<|endoftext|>"], dtype=np.int32)
        ones = np.ones(len(row) - 1, np.float32)
        nats += float(
            engine.score(Batch(row[None, :-1], row[None, 1:], document[None], ones[None])).sum(
                dtype=np.float64
            )
        )
    text_bytes = int(tokenizer.token_lengths[ids].sum())
    assert told == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)


def outs(folder: Path) -> dict[str, bytes]:
    """The bytes of every file that DVC hashes or git keeps."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "speed.csv")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_killed_and_resumed_gives_the_same_bytes(
    corpus: Any, settings_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch an out that shows that the run was stopped, or that depends on time or folder: DVC would
    run it again where its lock was put back."""
    whole = run(corpus, settings_with(), "whole")
    stopped_at(monkeypatch, 3, kill)
    monkeypatch.setenv("DVC_ROOT", "elsewhere")
    with pytest.raises(SystemExit):
        run(corpus, settings_with(), "parts")
    parts = run(corpus, settings_with(), "parts")
    assert outs(whole) == outs(parts) and len(outs(whole)) == 5
    provenance = next(Path("elsewhere/.nanoeuler/runs").glob("pretrain-*/provenance.json"))
    assert json.loads(provenance.read_text(encoding="utf-8"))["resumed_at"] == [2]


def test_only_the_same_work_is_resumed(
    corpus: Any, settings_with: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a run that continues from weights of another learning rate, or repeats finished work; outs
    of finished work that come back otherwise; and its provenance overwritten by the run that only wrote the
    outs again."""
    first = run(corpus, settings_with(), "first")
    provenance = next(Path(".nanoeuler/runs").glob("pretrain-*/provenance.json"))
    told = provenance.read_bytes()
    capsys.readouterr()
    again = run(corpus, settings_with(), "again")
    printed = capsys.readouterr().out
    assert "resumed at step 6" in printed and "loss" not in printed
    assert outs(again) == outs(first) and provenance.read_bytes() == told
    run(corpus, settings_with("pretrain.lr=0.001"), "other")
    assert "resumed" not in capsys.readouterr().out


def test_ctrl_c_exits_130_and_goes_on(
    corpus: Any, settings_with: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch exit code 0 after Ctrl-C, which DVC would record as success, and `interrupted` printed
    twice.
    """
    whole = run(corpus, settings_with(), "whole")
    monkeypatch.setenv("DVC_ROOT", "elsewhere")
    stopped_at(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGINT))

    def stage(argv: list[str]) -> None:
        run(corpus, settings_with())

    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        command_main(stage)
    assert stopped.value.code == 130 and not Path("out/checkpoint").exists()
    printed = "".join(capsys.readouterr())
    assert printed.count("interrupted") == 1 and printed.count("Ctrl-C: saving") == 1
    out = run(corpus, settings_with())
    assert (
        "resumed at step 2" in capsys.readouterr().out
    )  # whose third batch, of index 2, was fetched within step 2
    assert outs(out) == outs(whole)


def test_steps_of_a_wsd_run_can_be_raised(
    corpus: Any, settings_with: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a shared_hash that depends on the steps, and a longer run that differs from one from
    scratch.

    Also one that resumes after a change of the data or the learning rate.
    """
    wsd = ("pretrain.schedule=wsd", "pretrain.cooldown_steps=2")
    more = ("pretrain.schedule=wsd", "pretrain.cooldown_steps=3", "pretrain.steps=9")
    whole = run(corpus, settings_with(*more), "whole")
    monkeypatch.setenv("DVC_ROOT", "elsewhere")
    run(corpus, settings_with(*wsd), "short")
    capsys.readouterr()
    longer = run(corpus, settings_with(*more), "long")
    assert "resumed at step 4 of an earlier run of 6 steps" in capsys.readouterr().out
    assert outs(longer) == outs(whole)
    run(corpus, settings_with(*more, "pretrain.lr=0.001"), "other")
    run(corpus, settings_with(), "cosine")
    run(corpus, settings_with("pretrain.steps=9"), "longer cosine")
    assert "goes on from" not in capsys.readouterr().out


# --- init_from


@pytest.fixture
def first(corpus: Any, settings_with: Make) -> Path:
    """A finished checkpoint, copied to a folder that no stage writes."""
    copytree(run(corpus, settings_with(), "base") / "checkpoint", "models/first")
    return Path("models/first")


def test_training_starts_with_a_checkpoint(
    corpus: Any, settings_with: Make, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch random weights in place of the checkpoint's, moments or steps of its run, and a state
    resumed although the checkpoint is another one."""
    still = ("pretrain.lr=1e-12", f"pretrain.init_from={first}")
    out = run(corpus, settings_with(*still), "still")
    for name, array in checkpoint.load(out / "checkpoint").weights.items():
        assert np.allclose(array, checkpoint.load(first).weights[name], rtol=0, atol=1e-9), name
    with (out / "curves" / "train.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 7)) and float(rows[0]["lr"]) < float(
        rows[1]["lr"]
    )
    capsys.readouterr()
    model = checkpoint.load(first)
    halved = {name: array / 2 for name, array in model.weights.items()}
    checkpoint.save(first, halved, model.config, model.tokenizer_sha256)
    again = checkpoint.load(run(corpus, settings_with(*still), "again") / "checkpoint").weights
    assert "resumed" not in capsys.readouterr().out
    assert all(np.allclose(again[name], array, rtol=0, atol=1e-9) for name, array in halved.items())


def test_a_checkpoint_of_another_model_is_refused(
    corpus: Any, settings_with: Make, first: Path, tmp_path: Path
) -> None:
    """Would catch NumPy's complaint about shapes, the same shapes under other settings, and ids that mean
    something else.
    """
    start = f"pretrain.init_from={first}"
    with pytest.raises(
        ValueError, match=r"init_from: models/first holds another model; set model.heads=2 model.ffn=24$"
    ):
        run(corpus, settings_with(start, "model.heads=1", "model.ffn=28"))
    with pytest.raises(
        ValueError, match=r"none/such/model.json: .* none; set pretrain.init_from to a folder with model.json"
    ):
        run(corpus, settings_with("pretrain.init_from=none/such"))
    special = list(Tokenizer.load(corpus.tokenizer).special)
    Tokenizer.train(["another text, another vocabulary"], 256 + len(special), special).save(
        tmp_path / "tokenizer.json"
    )
    other = type(corpus)(corpus.folder, tmp_path / "tokenizer.json", corpus.shards, corpus.train, corpus.val)
    with pytest.raises(
        ValueError,
        match=r"models/first was trained with tokenizer .*; set train_bpe.pretrained to the tokenizer.json of that",
    ):
        run(other, settings_with(start))


@pytest.mark.parametrize(
    "path", ["data/pretrain/checkpoint", "data/pretrain", "data/x/../pretrain/a", "data/sft/checkpoint", ""]
)
def test_a_checkpoint_that_dvc_deletes_is_refused(settings_with: Make, path: str) -> None:
    """Would catch hours of training lost: DVC empties data/pretrain before the stage can read it."""
    expected = (
        "deletes it before the run. Copy it .*cp -rL .* models/first"
        if path
        else "expected the folder of a checkpoint, or conf/none"
    )
    with pytest.raises(ValueError, match=f"^pretrain.init_from: .*{expected}"):
        settings_with(f"pretrain.init_from='{path}'")
    assert settings_with("pretrain.init_from=data/pretrained").pretrain.initial == Path("data/pretrained")


def test_only_the_plan_is_printed(
    corpus: Any, settings_with: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a plan that trains, or writes something that DVC would take for a result."""
    run(corpus, settings_with("runtime.plan=true"))
    printed = capsys.readouterr().out
    assert "parameters" in printed and "total" in printed and "step" not in printed
    assert list(Path().iterdir()) == []


def test_muon_is_what_trains(corpus: Any, settings_with: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch an engine with another optimizer, and a memory plan without its buffers."""
    for plan in ("true", "false"):
        run(corpus, settings_with("pretrain.optimizer=muon", f"runtime.plan={plan}"))
        printed = capsys.readouterr().out
        assert "\n  muon  " in printed and ("; Muon for " in printed) == (plan == "false")


def test_validation_smaller_than_a_window_is_refused(corpus: Any, settings_with: Make) -> None:
    """Would catch a crash or an empty validation after hours of training."""
    with pytest.raises(ValueError, match=r"split val has \d+ tokens and needs 4097, .*model.context"):
        run(corpus, settings_with("model.context=4096"))


def test_shards_of_another_tokenizer_are_refused(corpus: Any, settings_with: Make, tmp_path: Path) -> None:
    """Would catch training on ids that mean something else."""
    special = list(Tokenizer.load(corpus.tokenizer).special)
    Tokenizer.train(["another text, another vocabulary"], 256 + len(special), special).save(
        tmp_path / "tokenizer.json"
    )
    other = type(corpus)(corpus.folder, tmp_path / "tokenizer.json", corpus.shards, corpus.train, corpus.val)
    with pytest.raises(ValueError, match=r"index\.json: expected shards of tokenizer"):
        run(other, settings_with())
