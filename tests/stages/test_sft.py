"""The stage sft, small: it starts from the base model, and only answers are supervised."""

import csv
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.batch import Batch, head_weight_sums
from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine
from stages import checkpoint, pretrain, sft
from stages.chat_template import read_conversations, render, render_all
from stages.packing import SftBatches
from stages.settings import Settings
from stages.tokenizer import Tokenizer
from tests.compare import assert_within

Make = Callable[..., Settings]
OUTS = ("checkpoint", "samples.txt", "curves", "speed.csv")


@pytest.fixture(scope="module")
def base(corpus: Any, settings_with: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model's checkpoint."""
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("DVC_ROOT", raising=False)
        outs: dict[str, Any] = {out.partition(".")[0]: folder / out for out in OUTS}
        pretrain.run(settings_with(), tokenizer_path=corpus.tokenizer, shards=corpus.shards, **outs)
    return folder / "checkpoint"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume states go to the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)


def run(corpus: Any, base: Path, settings: Settings, name: str = "out", **paths: Path) -> Path:
    """Runs the stage into a folder of the current one; returns that."""
    folder = Path(name)
    outs = {out.partition(".")[0]: folder / out for out in OUTS}
    given = {
        "tokenizer_path": corpus.tokenizer,
        "base": base,
        "train": corpus.train,
        "val": corpus.val,
        **outs,
        **paths,
    }
    sft.run(settings, **given)
    return folder


def curve(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_starts_from_the_base_model_and_learns(corpus: Any, base: Path, settings_with: Make) -> None:
    """Would catch random initial weights, and answers that are not trained."""
    out = run(corpus, base, settings_with("sft.steps=40", "sft.lr=0.01", "sft.val_every=40"))
    before, after = checkpoint.load(base), checkpoint.load(out / "checkpoint")
    assert after.config == before.config and after.tokenizer_sha256 == before.tokenizer_sha256
    train = curve(out / "curves" / "train.csv")
    assert float(train[-1]["loss"]) < float(train[0]["loss"]) / 2
    still = run(corpus, base, settings_with("sft.lr=1e-12", "sft.min_lr=0"), "still")
    for name, array in checkpoint.load(still / "checkpoint").weights.items():
        assert np.allclose(array, before.weights[name], rtol=0, atol=1e-9), name
    assert "Who " in (out / "samples.txt").read_text(encoding="utf-8")


def test_validation_is_the_loss_of_the_held_out_answers(corpus: Any, base: Path, settings_with: Make) -> None:
    """Would catch questions or padding in the loss, a conversation lost in packing, or attention across
    conversations.

    Each conversation alone in its row gives the packed figure but for rounding: 1e-5 of it.
    """
    out = run(corpus, base, settings_with())
    told = curve(out / "curves" / "val.csv")[-1]
    model, tokenizer = checkpoint.load(out / "checkpoint"), Tokenizer.load(corpus.tokenizer)
    engine = Engine(model.config, Numerics(), micro_batch=1, device="cpu", threads=1, training=False)
    engine.load(model.weights)
    nats, targets, answer_bytes = 0.0, 0.0, 0
    for messages in read_conversations(corpus.val):
        ids, weight = render(messages, tokenizer)
        batch = Batch(ids[None, :-1], ids[None, 1:], np.zeros((1, len(ids) - 1), np.int32), weight[None, 1:])
        nats += float(np.sum(engine.score(batch) * batch.loss_weight, dtype=np.float64))
        targets += float(weight.sum())
        answer_bytes += len(messages[1]["content"].encode())
    assert float(told["val_loss"]) == pytest.approx(nats / targets, rel=1e-5)
    assert float(told["val_bpb"]) == pytest.approx(nats / math.log(2) / answer_bytes, rel=1e-5)


def test_the_same_run_gives_the_same_bytes(
    corpus: Any, base: Path, settings_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch an order of conversations, or of sums, that changes from run to run."""
    first = run(corpus, base, settings_with(), "first")
    monkeypatch.setenv("DVC_ROOT", "elsewhere")  # so that nothing is resumed
    second = run(corpus, base, settings_with(), "second")
    assert (first / "checkpoint" / checkpoint.WEIGHTS).read_bytes() == (
        second / "checkpoint" / checkpoint.WEIGHTS
    ).read_bytes()


def test_packed_conversations_are_learnt_as_if_each_stood_alone(corpus: Any) -> None:
    """Would catch attention, positions, weights or heads' targets that see a neighbour in the row, or what
    the padding adds.

    Loss sums and gradients of all heads, in float64, where only the order of sums differs between the two.
    """
    tokenizer = Tokenizer.load(corpus.tokenizer)
    rendered = render_all(
        islice(read_conversations(corpus.train), 12), tokenizer, context=64, overflow="drop"
    )
    config = ModelConfig(
        tokenizer.vocab_size, layers=2, heads=2, kv_heads=1, dim=16, ffn=24, context=64, mtp_heads=2
    )
    pad = tokenizer.special["<|pad|>"]
    batches = SftBatches(rendered, micro_batch=1, context=64, pad_id=pad, seed=1)
    packed = [batches.batch(index) for index in range(batches.rows)]
    assert len(packed) < len(rendered) and any((batch.tokens == pad).any() for batch in packed)
    alone = []
    for ids, supervised in (rendered[number] for number in range(len(rendered))):
        tokens, weight = ids[None, :-1], supervised[None, 1:].astype(np.float32)
        alone.append(Batch(tokens.copy(), ids[None, 1:].copy(), np.zeros(tokens.shape, np.int32), weight))
    results = []
    for parts in (packed, alone):
        engine = Engine(config, Numerics(), micro_batch=1, threads=1, seed=4, dtype=np.float64)
        sums = sum(head_weight_sums(batch, 2) for batch in parts)
        for batch in parts:
            engine.micro_step(batch, np.array([1.0, 0.1]) / sums)
        gradients = engine.gradients()
        results.append({**gradients, "sums": np.array(sums), "nll": engine.update(0.0).nll_sums})
    for name, expected in results[1].items():
        assert np.any(expected), name
        assert_within(name, results[0][name], expected, 1e-12 * float(np.abs(expected).max()))


def test_a_base_model_of_another_tokenizer_is_refused(
    corpus: Any, base: Path, settings_with: Make, tmp_path: Path
) -> None:
    """Would catch a chat model trained on ids that mean something else."""
    special = list(Tokenizer.load(corpus.tokenizer).special)
    Tokenizer.train(["another text, another vocabulary"], 256 + len(special), special).save(
        tmp_path / "tokenizer.json"
    )
    with pytest.raises(ValueError, match="checkpoint: trained with tokenizer"):
        run(corpus, base, settings_with(), tokenizer_path=tmp_path / "tokenizer.json")


def test_heads_of_another_model_are_refused(corpus: Any, base: Path, settings_with: Make) -> None:
    """Would catch NumPy's complaint about shapes from within the first update."""
    with pytest.raises(
        ValueError, match=r"sft.mtp_loss_weights: .* each of the \d MTP heads of .*, got 1; set model.mtp"
    ):
        run(corpus, base, settings_with("model.mtp_heads=1"))


def test_only_the_plan_is_printed(
    corpus: Any, base: Path, settings_with: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a plan that trains."""
    run(corpus, base, settings_with("runtime.plan=true"))
    assert "total" in capsys.readouterr().out and list(Path().iterdir()) == []


def test_muon_is_what_trains(
    corpus: Any, base: Path, settings_with: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch an engine with another optimizer, and a memory plan without its buffers."""
    for plan in ("true", "false"):
        run(corpus, base, settings_with("sft.optimizer=muon", f"runtime.plan={plan}"))
        printed = capsys.readouterr().out
        assert "\n  muon  " in printed and ("; Muon for " in printed) == (plan == "false")
