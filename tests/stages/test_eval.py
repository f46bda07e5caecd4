"""The stage eval: each metric compared with a plain computation; complete, finite and reproducible
outputs.
"""

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.batch import Batch
from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine
from kernels.generation import Sampling
from kernels.ranks import ALONE, OneRank
from stages import checkpoint, eval, eval_report, scoring
from stages.batches import EvalWindows
from stages.chat_template import read_conversations, render_prompt
from stages.packing import EvalConversations
from stages.settings import Settings
from stages.shard_format import open_split, read_shard
from stages.text_files import RowWriter, atomic_file
from stages.tokenizer import Tokenizer

Make = Callable[..., Settings]
FIGURES = (
    "loss",
    "perplexity",
    "bits_per_byte",
    "answer_loss",
    "answer_loss_shuffled",
    "end_of_turn_loss",
    "sft_loss",
)


@pytest.fixture(scope="module")
def models(corpus: Any, settings_with: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two untrained models."""
    tokenizer, folder = Tokenizer.load(corpus.tokenizer), tmp_path_factory.mktemp("models")
    config = settings_with().model.config(tokenizer.vocab_size)
    for seed, name in enumerate(("base", "chat")):
        engine = Engine(config, Numerics(), micro_batch=1, device="cpu", threads=1, seed=seed)
        checkpoint.save(folder / name, engine.weights(), config, tokenizer.sha256)
    return {name: folder / name for name in ("base", "chat")}


def run(corpus: Any, models: dict[str, Path], settings: Settings, folder: Path) -> Path:
    eval.run(
        settings,
        tokenizer_path=corpus.tokenizer,
        shards=corpus.shards,
        conversations=corpus.val,
        checkpoints=models,
        folder=folder,
    )
    return folder


@pytest.fixture(scope="module")
def out(
    corpus: Any, models: dict[str, Path], settings_with: Make, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What the stage writes for the two models."""
    return run(corpus, models, settings_with(), tmp_path_factory.mktemp("eval"))


def test_metrics_are_complete_finite_and_in_order(out: Path, corpus: Any) -> None:
    """Would catch a figure that is missing, NaN (no JSON), or lost in a change of names that
    `dvc metrics diff` compares.
    """
    metrics = json.loads(
        (out / "metrics.json").read_text(encoding="utf-8"), parse_constant=lambda text: pytest.fail(text)
    )
    assert list(metrics) == ["device", "text_tokens", "text_bytes", "conversations", "base", "chat"]
    assert list(metrics["base"]) == [*FIGURES, "heads"]
    assert list(metrics["chat"]) == [*FIGURES, "replies", "replies_ended", "heads"]
    assert metrics["device"] == "cpu" and 0 <= metrics["chat"]["replies_ended"] <= 1
    tokenizer = Tokenizer.load(corpus.tokenizer)
    prompts = [render_prompt(talk[:1], tokenizer) for talk in read_conversations(corpus.val)]
    assert metrics["chat"]["replies"] == sum(len(prompt) <= 32 // 2 for prompt in prompts)
    for name in ("base", "chat"):
        assert metrics[name]["perplexity"] == pytest.approx(math.exp(metrics[name]["loss"]), rel=1e-4)
        assert list(metrics[name]["heads"]) == ["0", "1"]


def test_report_and_curves_hold_both_models(out: Path, settings_with: Make) -> None:
    """Would catch a report without its samples, heads or machine."""
    report = (out / "report.md").read_text(encoding="utf-8")
    for part in (
        "| | base | chat |",
        "## Samples of the base model",
        "## Samples of the chat model",
        "Made on: CPU",
    ):
        assert part in report
    for prompt in (*settings_with().eval.prompts, *settings_with().eval.chat_prompts):
        assert eval_report.indented(prompt) in report
    with (out / "heads.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], row["head"]) for row in rows] == [
        ("base", "0"),
        ("base", "1"),
        ("chat", "0"),
        ("chat", "1"),
    ]


def test_the_same_models_give_the_same_bytes(
    out: Path, corpus: Any, models: dict[str, Path], settings_with: Make, tmp_path: Path
) -> None:
    """Would catch a time in a file that DVC compares, and samples or a shuffle without their seed."""
    run(corpus, models, settings_with(), tmp_path)
    for name in ("metrics.json", "heads.csv", "report.md"):
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes(), name


def test_the_micro_batch_does_not_change_the_measures(
    out: Path, corpus: Any, models: dict[str, Path], settings_with: Make, tmp_path: Path
) -> None:
    """Would catch rows that fill the last batch and are counted; rounding leaves 1e-5."""
    run(corpus, models, settings_with("eval.micro_batch=7"), tmp_path)
    before, after = (
        json.loads((folder / "metrics.json").read_text(encoding="utf-8")) for folder in (out, tmp_path)
    )
    for name in ("base", "chat"):
        assert [after[name][figure] for figure in FIGURES] == pytest.approx(
            [before[name][figure] for figure in FIGURES], rel=1e-5
        )


def test_text_is_scored_whole_and_every_head_where_it_predicts(corpus: Any, models: dict[str, Path]) -> None:
    """Would catch a skipped window, a head compared with the wrong token, and a unigram loss over other
    tokens.

    Plain loops over single windows, in float64 from the same fp32 losses: rounding of the engine's batches
    leaves 1e-5.
    """
    model, tokenizer = checkpoint.load(models["base"]), Tokenizer.load(corpus.tokenizer)
    train, val = (
        open_split(corpus.shards, split, tokenizer.sha256, tokenizer.vocab_size) for split in ("train", "val")
    )
    separator, context = tokenizer.special["<|endoftext|>"], model.config.context
    engine = Engine(model.config, Numerics(), micro_batch=4, device="cpu", threads=1, training=False)
    engine.load(model.weights)
    windows = EvalWindows(val, micro_batch=4, context=context, separator_id=separator, document_mask=True)
    found = scoring.score_text(engine, windows, scoring.unigram_nats(train), 2)

    counts = np.bincount(read_shard(corpus.shards / "train_00000.bin"), minlength=tokenizer.vocab_size) + 1.0
    ids = read_shard(corpus.shards / "val_00000.bin").astype(np.int32)
    sums = np.zeros((2, 4))
    for start in range(0, len(ids) - 1, context):
        row = ids[start : start + context + 1]
        document = np.cumsum(row[:-1] == separator, dtype=np.int32)
        ones = np.ones((1, len(row) - 1), np.float32)
        each = engine.evaluate(Batch(row[None, :-1], row[None, 1:], document[None], ones))
        for k in range(2):
            for t in range(len(row) - 1 - k):
                if document[t + k] == document[t]:
                    unigram = -math.log(counts[row[t + k + 1]] / counts.sum())
                    sums[k] += [1, each.nll[k, 0, t], each.correct[k, 0, t], unigram]
    assert sums[0, 0] == len(ids) - 1 == windows.targets
    assert found.loss == found.heads[0].loss
    text_bytes = int(tokenizer.token_lengths[ids].sum())
    assert found.bits_per_byte == pytest.approx(sums[0, 1] / math.log(2) / text_bytes, rel=1e-5)
    for k, head in enumerate(found.heads):
        assert [head.loss, head.accuracy, head.unigram_loss] == pytest.approx(
            sums[k, 1:] / sums[k, 0], rel=1e-5
        )


class Oracle:
    """A stand-in engine: a target costs 1 nat if it occurred before it in its document, 5 if not, an end of
    turn 3.
    """

    def __init__(self, end_id: int) -> None:
        self.end_id, self.ranks = end_id, OneRank(ALONE)

    def score(self, batch: Batch) -> np.ndarray:
        nll = np.full(batch.tokens.shape, 5.0, np.float32)
        for row, t in np.ndindex(nll.shape):
            seen = batch.tokens[row, : t + 1][batch.document[row, : t + 1] == batch.document[row, t]]
            if batch.targets[row, t] == self.end_id:
                nll[row, t] = 3
            elif batch.targets[row, t] in seen:
                nll[row, t] = 1
        return nll


def test_answers_cost_more_after_shuffled_questions(corpus: Any) -> None:
    """Would catch questions that are not exchanged, answers that differ between both, and end tokens counted
    as content.
    """
    tokenizer = Tokenizer.load(corpus.tokenizer)
    held_out = list(read_conversations(corpus.val))
    answers = scoring.held_out_answers(held_out, tokenizer, context=32, seed=3)
    true, shuffled = answers.true, answers.shuffled
    assert true and shuffled and not answers.missing
    assert sorted(true[n][0][true[n][1]].tobytes() for n in range(len(true))) == sorted(
        shuffled[n][0][shuffled[n][1]].tobytes() for n in range(len(shuffled))
    )
    end, rows = (
        tokenizer.special["<|end|>"],
        {"micro_batch": 4, "context": 32, "pad_id": tokenizer.special["<|pad|>"]},
    )
    engine: Any = Oracle(end)
    own, foreign = (
        scoring.score_answers(engine, EvalConversations(each, **rows), end) for each in (true, shuffled)
    )
    assert own.end_loss == foreign.end_loss == 3
    assert 1 <= own.content_loss < foreign.content_loss <= 5
    lengths = [len(tokenizer.encode(talk[1]["content"])) for talk in held_out]
    expected = (own.content_loss * sum(lengths) + 3 * len(lengths)) / (sum(lengths) + len(lengths))
    assert own.loss == pytest.approx(expected, rel=1e-12)


def test_a_conversation_that_fits_one_way_only_takes_no_part(corpus: Any) -> None:
    """Would catch two sets of answers that are not the same, whose losses cannot be compared."""
    tokenizer = Tokenizer.load(corpus.tokenizer)
    talks = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in (("king " * 12, "x"), ("q", "y" * 20), ("r", "z"), ("s", "w"))
    ]
    answers = scoring.held_out_answers(talks, tokenizer, context=32, seed=0)
    true, shuffled = answers.true, answers.shuffled
    assert true and shuffled and not answers.missing
    answer_ids = [
        sorted(each[n][0][each[n][1]].tobytes() for n in range(len(each))) for each in (true, shuffled)
    ]
    assert answer_ids[0] == answer_ids[1] and 1 <= len(true) <= 4


# eval failed after all training if one conversation was held out, or none fitted: the other metrics were lost
# with it.
@pytest.mark.parametrize(
    ("talks", "context", "missing"),
    [
        (1, 32, {"answer_loss_shuffled": "there is only one held-out conversation"}),
        (
            4,
            3,
            dict.fromkeys(
                ("answer_loss", "end_of_turn_loss", "sft_loss", "answer_loss_shuffled"), "none of 4 held-out"
            ),
        ),
        (
            0,
            32,
            dict.fromkeys(
                ("answer_loss", "end_of_turn_loss", "sft_loss", "answer_loss_shuffled"), "none of 0 held-out"
            ),
        ),
    ],
)
def test_a_figure_that_cannot_be_had_has_a_reason(
    corpus: Any, talks: int, context: int, missing: dict[str, str]
) -> None:
    tokenizer = Tokenizer.load(corpus.tokenizer)
    held_out = list(read_conversations(corpus.val))[:talks]
    answers = scoring.held_out_answers(held_out, tokenizer, context=context, seed=0)
    assert answers.missing.keys() == missing.keys()
    assert all(answers.missing[figure].startswith(reason) for figure, reason in missing.items())
    assert (answers.true is None) == ("answer_loss" in missing) and answers.shuffled is None


def test_a_report_with_one_conversation(
    corpus: Any, models: dict[str, Path], settings_with: Make, tmp_path: Path
) -> None:
    """Would catch an evaluation that fails, or silently omits a metric."""
    with atomic_file(tmp_path / "val.zst") as stream:
        writer = RowWriter(stream)
        writer.write({"messages": next(read_conversations(corpus.val))})
        writer.finish()
    run(dataclasses.replace(corpus, val=tmp_path / "val.zst"), models, settings_with(), tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert list(metrics["base"]) == [
        figure for figure in (*FIGURES, "heads") if figure != "answer_loss_shuffled"
    ]
    assert "answer_loss_shuffled" in metrics["missing"]
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert (
        "- answer_loss_shuffled: there is only one held-out conversation: no other question to exchange"
        in report
    )


class Writer:
    """A stand-in engine that likes best the token after the last one it read."""

    micro_batch, config = (
        4,
        ModelConfig(vocab_size=64, layers=1, heads=1, kv_heads=1, dim=8, ffn=8, context=16),
    )

    @property
    def decoder(self) -> "Writer":
        return self

    def cache(self, batch: int = 1) -> Any:
        return SimpleNamespace(truncate=lambda length: None)

    def sample_next(self, tokens: np.ndarray, *arguments: Any, **sampling: Any) -> np.ndarray:
        return tokens[:, -1] + 1

    def sample_stream(
        self, tokens: np.ndarray, cache: Any, uniforms: Iterable[Any], *arguments: Any, **sampling: Any
    ) -> Iterator[Any]:
        yield from (tokens[:, -1] + count for count, _ in enumerate(uniforms, 1))


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "lengths", "ended"),
    [
        ([[4], [7], [19]], 6, [5, 2, 6], [True, True, False]),  # the end is token 10; the last never meets it
        ([[4]], 5, [5], [False]),  # it would come as the sixth
        (
            [[1] * 15 + [8], [1] * 14 + [8]],
            20,
            [1, 1],
            [False, True],
        ),  # the first would need a context of 17 for it
        ([], 20, [], []),
    ],
)
def test_a_reply_ends_by_itself_or_not(
    prompts: list[list[int]], max_tokens: int, lengths: list[int], ended: list[bool]
) -> None:
    """Would catch a cut reply counted as ended, also one that continued beyond a full context, and the end
    token as text.
    """
    engine: Any = Writer()
    replies = scoring.write_replies(
        engine, prompts, Sampling(temperature=0), max_tokens=max_tokens, end_id=10
    )
    assert ([len(reply.ids) for reply in replies], [reply.ended for reply in replies]) == (lengths, ended)


def test_the_unigram_loss_of_its_own_text_is_its_entropy(corpus: Any) -> None:
    """Would catch counts of the wrong split or width; adding one to each count moves it by less than
    vocabulary / tokens.
    """
    tokenizer = Tokenizer.load(corpus.tokenizer)
    nats = scoring.unigram_nats(open_split(corpus.shards, "train", tokenizer.sha256, tokenizer.vocab_size))
    ids = read_shard(corpus.shards / "train_00000.bin")
    share = np.bincount(ids, minlength=tokenizer.vocab_size) / len(ids)
    entropy = -float(np.sum(share[share > 0] * np.log(share[share > 0])))
    assert nats.shape == (tokenizer.vocab_size,) and np.exp(-nats).sum() == pytest.approx(1, rel=1e-12)
    assert entropy <= float(share @ nats) <= entropy + tokenizer.vocab_size / len(ids)


def test_spread_takes_first_last_and_no_item_twice() -> None:
    """Would catch replies to the first questions of the file only, all of one source."""
    assert eval.evenly_spaced(list(range(1000)), 3) == [0, 499, 999]
    assert eval.evenly_spaced([1, 2], 5) == [1, 2] and eval.evenly_spaced([], 5) == []
    assert len(set(eval.evenly_spaced(list(range(101)), 100))) == 100


def test_a_figure_that_is_not_finite_is_an_error() -> None:
    """Would catch NaN in metrics.json, which is no JSON."""
    with pytest.raises(ValueError, match=r"base\.heads\.0\.loss is nan"):
        eval_report.rounded({"heads": {"0": {"loss": math.nan}}}, "base")


def test_samples_cannot_break_the_report() -> None:
    """Would catch a sample whose Markdown or control characters end its block."""
    assert eval_report.indented("a\n```\n# b\x00\r") == "    a\n    ```\n    # b\ufffd\ufffd"


def test_a_model_of_another_tokenizer_is_refused(
    corpus: Any, models: dict[str, Path], settings_with: Make, tmp_path: Path
) -> None:
    """Would catch figures of a model that reads other ids."""
    config = ModelConfig(vocab_size=300, layers=1, heads=1, kv_heads=1, dim=8, ffn=8, context=32)
    checkpoint.save(tmp_path / "chat", {}, config, "0" * 64)
    with pytest.raises(ValueError, match="chat: trained with tokenizer 000000000000"):
        run(corpus, {**models, "chat": tmp_path / "chat"}, settings_with(), tmp_path)
