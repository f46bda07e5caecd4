"""The engine: what an update is, what stays the same when it should, and what is refused."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from kernels import memory
from kernels.arena import ALIGNMENT_BYTES
from kernels.batch import Batch, document_start, head_targets, head_weight_sums
from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine
from kernels.optimizers import AdamW
from kernels.parameters import INIT_DIM, INIT_STD
from tests.compare import Array, Arrays, assert_calibrated, assert_same_bits, assert_within
from tests.gradient_check import MODELS, MTP_WEIGHTS

ROWS, CONTEXT, VOCAB = 4, 11, 61
PLAIN = Numerics()
NAMES = pytest.mark.parametrize("name", MODELS)


def make(name: str, **kind: Any) -> Engine:
    """An engine of one of the gradient check's models."""
    return Engine(MODELS[name], PLAIN, **{"micro_batch": ROWS, "threads": 1, **kind})


def make_batch(rows: int = ROWS, seed: int = 0, length: int = CONTEXT) -> Batch:
    """Random tokens, documents, and weights of which some are 0."""
    rng = np.random.default_rng([seed, rows])
    ids = rng.integers(VOCAB, size=(rows, length + 1), dtype=np.int32)
    document = np.cumsum(rng.random((rows, length)) < 0.2, axis=1, dtype=np.int32)
    weight = (rng.random((rows, length)) * (rng.random((rows, length)) < 0.7)).astype(np.float32)
    return Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), document, weight)


def scale_of(engine: Engine, *batches: Batch) -> Array:
    """head_scale of an update over these micro-batches."""
    heads = engine.config.mtp_heads
    return np.array(MTP_WEIGHTS[:heads]) / sum(head_weight_sums(batch, heads) for batch in batches)


def train(engine: Engine, steps: range, lr: float = 1e-2) -> Arrays:
    """An update a step, each with a batch of its own; the state and the losses after them."""
    sums = []
    for step in steps:
        batch = make_batch(seed=step)
        engine.micro_step(batch, scale_of(engine, batch))
        engine.reduce()
        sums.append(engine.update(lr).nll_sums)
    return {**engine.state(), "sums": np.array(sums)}


def accumulated(engine: Engine, *batches: Batch) -> Arrays:
    """Gradients of these micro-batches and, from the update that ends them, the loss sums and the norm."""
    for batch in batches:
        engine.micro_step(batch, scale_of(engine, *batches))
    gradients = engine.gradients()
    update = engine.update(0.0)
    return {**gradients, "nll_sums": update.nll_sums, "norm": np.array([update.grad_norm])}


# A part of the rows that is left out, counted twice, or scored against another part's targets.
@NAMES
def test_logits_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    results = []
    for most in (ROWS * CONTEXT, 15):  # rows
        monkeypatch.setattr(memory, "LOGITS_BYTES", most * MODELS[name].padded_vocab * 8)
        engine = make(name, dtype=np.float64)
        evaluation = engine.evaluate(batch)
        results.append({**accumulated(engine, batch), "nll": evaluation.nll, "correct": evaluation.correct})
    for tensor, whole in results[0].items():
        assert_within(tensor, results[1][tensor], whole, 1e-12 * float(np.abs(whole).max()))


# Every logit is near 0 at first: a wrong initial scale, or a loss in bits. A logit's variance is INIT_STD^2
# INIT_DIM = s^2 whatever the width, which adds s^2 / 2 to ln V; the mean over n targets of a logit spreads by
# s / sqrt(n), five of which are allowed. A tied head already knows the input token, which costs the others at
# most what its own logit takes.
@NAMES
def test_loss_at_the_start_is_that_of_guessing(name: str) -> None:
    engine, batch = make(name, micro_batch=32), make_batch(32)
    spread = INIT_STD * INIT_DIM**0.5
    nll = engine.evaluate(batch).nll
    own = INIT_STD * (INIT_DIM * engine.config.dim) ** 0.5 if engine.config.tied_head else 0.0
    for k in range(engine.config.mtp_heads):
        # Head k has targets at all but the last k positions of a row.
        mean = float(nll[k, :, : CONTEXT - k].mean())
        allowed = 5 * spread / (32 * (CONTEXT - k)) ** 0.5
        tied = float(np.log1p(np.exp(own) / VOCAB)) if k == 0 and own else 0.0
        assert -allowed <= mean - (np.log(VOCAB) + spread**2 / 2) <= allowed + tied, k


# Anything wrong with the update's sign, size or data: the model could not learn a batch by heart. No token
# occurs twice, so that a document's first one already tells all that follows.
@NAMES
def test_learns_one_batch_by_heart(name: str) -> None:
    engine, ids = (
        make(name, micro_batch=2, optimizer=AdamW(weight_decay=0.0)),
        np.random.default_rng(0).permutation(VOCAB).astype(np.int32)[:24].reshape(2, 12),
    )
    document = np.repeat([[0, 1], [0, 0]], [5, 6], axis=1).astype(np.int32)
    batch = Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), document, np.ones((2, CONTEXT), np.float32))
    sums = head_weight_sums(batch, engine.config.mtp_heads)
    scale = 1 / sums
    for _ in range(300):
        engine.micro_step(batch, scale)
        update = engine.update(1e-2)
    assert (update.nll_sums / sums < 0.02).all(), update.nll_sums / sums
    evaluation = engine.evaluate(batch)
    assert evaluation.correct[evaluation.weight > 0].all()


# An accumulation that averages the micro-batches' means weighs a nearly masked micro-batch like a full one.
# As exact, against float64, as one batch of twice the size.
@NAMES
def test_two_micro_steps_are_one_of_twice_the_size(name: str) -> None:
    whole = make_batch(4, seed=1)
    weight = whole.loss_weight.copy()
    weight[:2] *= 0.1
    whole = dataclasses.replace(whole, loss_weight=weight)
    fields = [field.name for field in dataclasses.fields(Batch)]
    halves = [
        Batch(**{f: getattr(whole, f)[part].copy() for f in fields}) for part in (slice(0, 2), slice(2, 4))
    ]
    oracle, baseline = accumulated(make(name, dtype=np.float64), whole), accumulated(make(name), whole)
    assert_calibrated(accumulated(make(name), *halves), oracle, baseline, 4)
    exact = accumulated(make(name, dtype=np.float64), *halves)
    for key in oracle:
        assert_within(key, exact[key], oracle[key], 1e-13 * (1e-3 + np.abs(oracle[key]).max()))


# Validation in the middle of an update that changes the gradient or the loss that is reported: spikes in the
# curve.
@NAMES
def test_evaluation_does_not_disturb_training(name: str) -> None:
    batches, results = [make_batch(seed=seed) for seed in (1, 2)], []
    for evaluate in (False, True):
        engine = make(name)
        scale = scale_of(engine, *batches)
        engine.micro_step(batches[0], scale)
        if evaluate:
            engine.evaluate(make_batch(seed=3))
            engine.score(make_batch(seed=4))
            engine.decoder.decode(np.ones((1, 3), np.int32), engine.decoder.cache())
        engine.micro_step(batches[1], scale)
        gradients = engine.gradients()
        update = engine.update(1e-2)
        results.append(
            {**gradients, **engine.state(), "sums": update.nll_sums, "norm": np.array(update.grad_norm)}
        )
    assert_same_bits(results[1], results[0])


# A resumed run that goes another way: moments or the count of updates, on which the bias correction hangs,
# left behind.
@NAMES
def test_resume_is_exact(name: str) -> None:
    whole, first, second = make(name), make(name), make(name, seed=9)
    uninterrupted = train(whole, range(6))
    saved = {key: array.copy() for key, array in train(first, range(3)).items() if key != "sums"}
    train(first, range(3, 4))
    second.micro_step(make_batch(), scale_of(second, make_batch()))  # left over: loading must clear it
    second.load_state(saved)
    resumed = train(second, range(3, 6))
    assert_same_bits(resumed, {**uninterrupted, "sums": uninterrupted["sums"][3:]})


# A state that is a view of the engine's own memory would change under the checkpoint that is being written.
def test_state_and_weights_are_copies() -> None:
    engine = make("euler")
    state, weights = engine.state(), engine.weights()
    before = {key: array.copy() for key, array in {**state, **weights}.items()}
    train(engine, range(1))
    assert_same_bits({**state, **weights}, before)


# Any order of summation that varies, also with the number of threads: a run could not be repeated, or not
# gone on with.
@NAMES
def test_same_seed_same_bits(name: str) -> None:
    first = train(make(name, seed=5), range(3))
    assert_same_bits(train(make(name, seed=5), range(3)), first)
    assert_same_bits(train(make(name, seed=5, threads=0), range(3)), first)
    assert (train(make(name, seed=6), range(3))["parameters"] != first["parameters"]).any()


# Packing that is more than a saving of space: attention, positions, or the targets of MTP heads that cross a
# border. The documents also lie one in each row of batches of their own length.
@NAMES
def test_packed_documents_are_separate_rows(name: str) -> None:
    rng, border = np.random.default_rng(7), 5
    ids = rng.integers(VOCAB, size=(1, CONTEXT + 1), dtype=np.int32)
    packed = Batch(
        ids[:, :-1].copy(),
        ids[:, 1:].copy(),
        (np.arange(CONTEXT) >= border).astype(np.int32)[None],
        rng.random((1, CONTEXT)).astype(np.float32),
    )
    fields = [field.name for field in dataclasses.fields(Batch)]
    parts = (slice(0, border), slice(border, None))
    rows = [Batch(**{f: getattr(packed, f)[:, part].copy() for f in fields}) for part in parts]
    one, two = make(name, dtype=np.float64), make(name, dtype=np.float64)
    nll = one.evaluate(packed).nll
    for part, row in zip(parts, rows, strict=True):
        evaluation = two.evaluate(row)
        seen = evaluation.weight > 0
        assert_within("nll", evaluation.nll[seen], nll[:, :, part][seen], 1e-12)
    together, apart = accumulated(one, packed), accumulated(two, *rows)
    for key in together:
        assert_within(key, apart[key], together[key], 1e-13 * (1e-3 + np.abs(together[key]).max()))


# Document ids are names, not an order: a later one may be smaller, and one that comes back is another
# document.
def test_document_start() -> None:
    document = np.array([[5, 5, 2, 2, 2, 9], [0, 0, 0, 0, 0, 0], [1, 2, 1, 1, 0, 0]], np.int32)
    expected = [[0, 0, 2, 2, 2, 5], [0, 0, 0, 0, 0, 0], [0, 1, 2, 2, 4, 4]]
    assert document_start(document).tolist() == expected
    assert document_start(document).dtype == np.int32


# Head k that predicts one token too few or too many ahead, across a border, beyond the row, or with the
# weight of the token it stands on instead of that of its target.
def test_head_targets_by_hand() -> None:
    targets = np.array([[11, 12, 13, 14, 15, 16]], np.int32)
    document = np.array([[0, 0, 0, 1, 1, 1]], np.int32)
    weight = np.array([[1, 0, 0.5, 1, 1, 0.25]], np.float32)
    batch = Batch(np.zeros_like(targets), targets, document, weight)
    got_targets, got_weight = head_targets(batch, 3)
    assert got_targets[0].tolist() == targets.tolist()
    assert got_weight[0].tolist() == weight.tolist()
    assert got_weight[1].tolist() == [[0, 0.5, 0, 1, 0.25, 0]]
    assert got_targets[1][0, [1, 3, 4]].tolist() == [13, 15, 16]
    assert got_weight[2].tolist() == [[0.5, 0, 0, 0.25, 0, 0]]
    assert got_targets[2][0, [0, 3]].tolist() == [13, 16]
    assert head_weight_sums(batch, 3).tolist() == [3.75, 1.75, 0.75]


# Evaluation's heads in another order than training's, or sums that are not those of its parts.
@NAMES
def test_update_reports_what_evaluate_measures(name: str) -> None:
    engine, batches = make(name, dtype=np.float64), [make_batch(seed=seed) for seed in (1, 2)]
    expected = np.zeros(engine.config.mtp_heads)
    for batch in batches:
        evaluation = engine.evaluate(batch)
        expected += (evaluation.nll * evaluation.weight).sum(axis=(1, 2))
        assert_within("score", engine.score(batch), evaluation.nll[0], 0)
    assert_within("sums", accumulated(engine, *batches)["nll_sums"], expected, 1e-12 * expected.max())


# The norm that is reported and clipped by is that of the whole gradient; two updates must not see the same
# gradient, nor losses.
@NAMES
def test_norm_and_clearing(name: str) -> None:
    engine, batch = make(name), make_batch()
    engine.micro_step(batch, scale_of(engine, batch))
    exact = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in engine.gradients().values()))
    assert engine.update(1e-3).grad_norm == pytest.approx(exact, rel=1e-5)
    fresh = make(name)
    fresh.load(engine.weights())
    for one in (engine, fresh):
        one.micro_step(batch, scale_of(one, batch))
    assert_same_bits(engine.gradients(), fresh.gradients())
    assert_same_bits(*({"nll_sums": one.update(1e-3).nll_sums} for one in (engine, fresh)))


# Padding rows that receive the softmax's share of the gradient, or that moments move: a token that does not
# exist would be learnt, and a checkpoint's bits depend on it.
@NAMES
def test_padding_rows_stay_zero(name: str) -> None:
    engine = make(name)
    train(engine, range(4))
    for vocabulary in {"tok.weight", "head.weight"} & engine.weights().keys():
        assert not engine.parameter(vocabulary)[..., VOCAB:, :].any()
        assert engine.parameter(vocabulary)[..., :VOCAB, :].any(axis=-1).all()


# An engine for chatting that shares one set of activations among layers where it must not.
@NAMES
def test_engine_without_training_computes_the_same(name: str) -> None:
    training, inference = make(name), make(name, training=False)
    train(training, range(2))
    inference.load(training.weights())
    results = [engine.evaluate(make_batch(seed=3)) for engine in (training, inference)]
    assert_same_bits(vars(results[1]), vars(results[0]))
    logits = [
        engine.decoder.decode(make_batch(2).tokens, engine.decoder.cache(2))
        for engine in (training, inference)
    ]
    assert_same_bits({"logits": logits[1]}, {"logits": logits[0]})


# An update whose gradient norm is not finite changes nothing: counted as a step, it would move AdamW's bias
# correction.
@NAMES
def test_nonfinite_update_is_no_step(name: str) -> None:
    engine, batch = make(name), make_batch()
    train(engine, range(1))
    before = engine.state()
    engine.micro_step(batch, np.full(engine.config.mtp_heads, np.nan))
    assert not np.isfinite(engine.update(1e-2).grad_norm)
    assert_same_bits(engine.state(), before)
    assert int(before["step"]) == 1


# The norm of the gradient alone does not say where a NaN came from; the first in the forward pass is nearest
# to the cause.
def test_first_nonfinite() -> None:
    engine, batch = make("gpt2"), make_batch()
    engine.micro_step(batch, scale_of(engine, batch))
    assert engine.first_nonfinite() is None
    engine.parameter("blocks.1.up.weight")[3, 2] = np.inf
    assert engine.first_nonfinite() == "blocks.1.up.weight"
    engine.parameter("pos.weight")[0, 0] = np.nan
    assert engine.first_nonfinite() == "pos.weight"
    bad = make("gpt2")
    bad.micro_step(batch, np.array([np.nan]))
    assert bad.first_nonfinite() == "gradient of tok.weight"


# A plan that says less than is taken: the machine would run out of memory after it was told that it will not.
@NAMES
@pytest.mark.parametrize("training", [True, False])
def test_plan_is_what_is_taken(name: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.cpu import CpuOps

    taken, allocate = [], CpuOps.allocate

    def noted(self: CpuOps, size: int) -> Array:
        taken.append(size)
        return allocate(self, size)

    monkeypatch.setattr(CpuOps, "allocate", noted)
    report = make(name, training=training).plan_report()
    total = float(report.splitlines()[-1].split()[1].replace(",", ""))
    # The report has a tenth of a MiB.
    assert abs(total * 2**20 - sum(taken)) <= 0.05 * 2**20 + ALIGNMENT_BYTES


# The line that tells what was chosen.
def test_describe() -> None:
    engine = make("euler")
    count = sum(weight.size for weight in engine.weights().values())
    assert re.match(r"CPU, 1 of \d+ processors, float32, NumPy .*, Numba .*; ", engine.describe())
    assert engine.describe().endswith(f"; {count:,} parameters")
    assert engine.device == "cpu"


# What can't be computed must say which key to change.
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"device": "gpu"}, r"^runtime\.device: expected one of auto, cpu, cuda, got 'gpu'$"),
        ({"threads": 4097}, r"^runtime\.threads: expected 0 \(all\) to \d+ on this machine, got 4097$"),
        ({"threads": -1}, r"^runtime\.threads: expected 0 \(all\) to \d+ on this machine, got -1$"),
    ],
)
def test_impossible_engines(kind: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("euler", **kind)


# A precision that is silently another.
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_precision_of_the_cpu(precision: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^numerics\.precision: the CPU computes in fp32, got {precision}; set it to fp32$"
    ):
        Engine(MODELS["euler"], Numerics(precision=precision), micro_batch=1)


def changed(**arrays: Array) -> Batch:
    """A batch with some of its arrays replaced."""
    return dataclasses.replace(make_batch(), **arrays)


ONES = np.ones((ROWS, CONTEXT), np.int32)


# A batch of the wrong shape, precision or vocabulary would read or write beyond an array: compiled loops do
# not look.
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (make_batch(ROWS + 1), r"^tokens: expected at most \(4, 11\), got \(5, 11\)$"),
        (make_batch(1, length=12), r"^tokens: expected at most \(4, 11\), got \(1, 12\)$"),
        (changed(tokens=ONES[0]), r"^tokens: expected at most \(4, 11\), got \(11,\)$"),
        (changed(tokens=ONES.astype(np.int64)), r"^tokens: expected \(4, 11\) int32, got \(4, 11\) int64$"),
        (changed(targets=ONES[:, :3]), r"^targets: expected \(4, 11\) int32, got \(4, 3\) int32$"),
        (changed(document=ONES[:2]), r"^document: expected \(4, 11\) int32, got \(2, 11\) int32$"),
        (
            changed(loss_weight=np.ones((4, 11))),
            r"^loss_weight: expected \(4, 11\) float32, got \(4, 11\) float64$",
        ),
        (changed(tokens=ONES * VOCAB), r"^tokens: expected ids 0 to 60, got 61 to 61$"),
        (changed(targets=-ONES), r"^targets: expected ids 0 to 60, got -1 to -1$"),
    ],
)
def test_impossible_batches(batch: Batch, message: str) -> None:
    engine = make("euler")
    for method in (engine.evaluate, engine.score):
        with pytest.raises(ValueError, match=message):
            method(batch)
    with pytest.raises(ValueError, match=message):
        engine.micro_step(batch, np.ones(3))
    assert not any(gradient.any() for gradient in engine.gradients().values())


# Weights of another model: a tensor left at its random start would not be noticed.
def test_impossible_weights() -> None:
    engine = make("euler")
    weights = engine.weights()
    missing = {name: weight for name, weight in weights.items() if name != "norm.weight"}
    with pytest.raises(ValueError, match=r"^weights: norm\.weight is missing$"):
        engine.load(missing)
    with pytest.raises(ValueError, match=r"^weights: extra is unknown to this model$"):
        engine.load({**weights, "extra": np.zeros(1)})
    with pytest.raises(ValueError, match=r"^weights: norm\.weight expected shape \(30,\), got \(31,\)$"):
        engine.load({**weights, "norm.weight": np.zeros(31, np.float32)})


# A batch may be narrower and shorter than the engine's largest: views of the same memory of another shape.
@NAMES
def test_smaller_batches(name: str) -> None:
    config: ModelConfig = MODELS[name]
    ids = np.arange(4, dtype=np.int32)[None]
    small = Batch(
        ids[:, :-1].copy(), ids[:, 1:].copy(), np.zeros((1, 3), np.int32), np.ones((1, 3), np.float32)
    )
    large, exact = (
        make(name, dtype=np.float64),
        Engine(config, PLAIN, micro_batch=1, threads=1, dtype=np.float64),
    )
    large.evaluate(make_batch())
    first, second = accumulated(large, small), accumulated(exact, small)
    for key in first:
        assert_within(key, first[key], second[key], 1e-13 * (1e-3 + np.abs(second[key]).max()))
