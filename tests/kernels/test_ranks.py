"""Ranks: how the flat arrays are split, the collectives, and that ranks train as one."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.config import ModelConfig
from kernels.optimizers import OPTIMIZERS, block_matrices, owned_matrices
from kernels.parameters import SEGMENT, flat_size, parameter_table
from kernels.ranks import ALONE, OneRank, Ranks
from kernels.split import balanced_cuts, equal_cuts
from tests.bench.engine import MODELS as BENCH_MODELS
from tests.compare import UNIT, Arrays, assert_calibrated, assert_same_bits, assert_within
from tests.gradient_check import MODELS
from tests.kernels.ranks_program import LR, UPDATES, head_scale, make, micro_batch, train

CASES = [(model, optimizer) for model in ("euler", "gpt2") for optimizer in OPTIMIZERS]
GPT2 = BENCH_MODELS["gpt2_124m"]


# An element that two ranks update, or none; a cut within a run of flags, within a matrix, or within a chunk
# whose sum a rank could not finish; gradients between two cuts that no one sends to their owner.
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("config", [*MODELS.values(), GPT2], ids=[*MODELS, "gpt2_124m"])
def test_parts_are_whole(config: ModelConfig, optimizer: str, ranks: int) -> None:
    table, chunk = parameter_table(config), 4096
    splits = [OPTIMIZERS[optimizer]().split(config, chunk, rank, ranks) for rank in range(ranks)]
    size = splits[0].size
    assert all(split.size == size >= flat_size(table) for split in splits)
    assert splits[0].own.start == splits[0].own_summed.start == 0
    assert splits[-1].own.stop == size and splits[-1].own_summed.stop == splits[-1].used == flat_size(table)
    for before, after in pairwise(splits):
        assert before.own.start <= before.own.stop == after.own.start
        assert before.own_summed.start <= before.own_summed.stop == after.own_summed.start
    for split in splits:
        assert all(cut % SEGMENT == 0 for cut in split.owned)
        assert all(cut % chunk == 0 or cut == size for cut in split.summed)
        for part, root in split.summed_for_others():
            assert splits[root].own_summed.start <= part.start <= part.stop <= splits[root].own_summed.stop
        own, own_summed = split.own, split.own_summed
        unsummed = slice(own.start, min(own.stop, max(own_summed.start, own.start)))
        if unsummed.start < unsummed.stop:
            sent = [part for part, _ in split.summed_for_others()]
            assert any(part.start <= unsummed.start and unsummed.stop <= part.stop for part in sent)
        assert min(own.stop, split.used) <= own_summed.stop
    if optimizer == "muon":
        owned = [sum(np.prod(group.shape[:2]) for group in owned_matrices(config, s.own)) for s in splits]
        assert sum(owned) == sum(np.prod(group.shape[:2]) for group in block_matrices(config))


# A rank that gets most of the work: all others wait for it.
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_work_is_balanced(ranks: int) -> None:
    table = parameter_table(GPT2)
    cuts = OPTIMIZERS["muon"]().cuts(table, ranks, 16384)
    assert len(cuts) == ranks + 1 and cuts[0] == 0 and cuts[-1] == flat_size(table)
    owned = [
        sum(int(np.prod(group.shape)) for group in owned_matrices(GPT2, slice(*part)))
        for part in pairwise(cuts)
    ]
    assert max(owned) <= 1.35 * sum(owned) / ranks, owned


# A limit that leaves a part out, or is larger than it need be.
def test_balanced_cuts() -> None:
    pieces = [(1, work) for work in (5.0, 1.0, 1.0, 1.0, 5.0, 2.0, 3.0)]
    assert balanced_cuts(pieces, 1) == (0, 7)
    assert balanced_cuts(pieces, 2) == (0, 4, 7)  # 8 and 10
    assert balanced_cuts(pieces, 3) == (0, 3, 5, 7)  # 7, 6 and 5
    assert balanced_cuts(pieces[:2], 4) == (0, 1, 2, 2, 2)


# Equal parts of whole chunks: NCCL's fastest collectives, and sums that any number of ranks can finish.
def test_equal_cuts() -> None:
    assert equal_cuts(1000, 1, 64) == (0, 1000)
    assert equal_cuts(1000, 2, 64) == (0, 512, 1024)
    assert equal_cuts(100, 3, 64) == (0, 64, 128, 192)


# A process alone that copies or loses what it has.
def test_one_rank_does_nothing() -> None:
    ranks, array = OneRank(ALONE), np.arange(6.0)
    ranks.sum(array)
    ranks.maximum(array)
    ranks.reduce_scatter(array, (0, 6))
    ranks.all_gather(array, (0, 6))
    ranks.broadcast(array)
    assert (array == np.arange(6)).all() and ranks.all_gather_object("x") == ["x"]
    assert list(ranks.spread(3, str)) == ["0", "1", "2"]


class Scripted(Ranks):
    """Rank 1 of 3 that gets what the script says."""

    def __init__(self, received: list[Any]) -> None:
        self.rank, self.size, self.sent = 1, 3, list[Any]()
        self.received = received
        self.link: Any = self

    def exchange(self, values: list[Any]) -> list[Any]:
        """Remembers what is sent."""
        self.sent = [np.copy(value) for value in values]
        return self.received


# A sum in another order than that of the ranks, whose bits would differ between them; a part that goes to
# another rank; measurements in the order in which ranks finish.
def test_collectives() -> None:
    parts = [np.array([1e8], np.float32), np.array([1.0], np.float32), np.array([-1e8], np.float32)]
    flat = np.array([5, 1, 7], np.float32)
    ranks = Scripted(parts)
    ranks.reduce_scatter(flat, (0, 1, 2, 3))
    assert [part.tolist() for part in ranks.sent] == [[5], [1], [7]]
    assert flat.tolist() == [5, 0, 7]  # 1e8 + 1 is 1e8 in fp32; another order gives 1
    Scripted([np.array([3.0]), np.array([4.0]), np.array([5.0])]).all_gather(flat, (0, 1, 2, 3))
    assert flat.tolist() == [3, 4, 5]
    Scripted([None, None, np.array([8, 8, 8])]).broadcast(flat, root=2)
    assert flat.tolist() == [8, 8, 8]
    array = np.array([1.0, 9.0])
    Scripted([np.array([2.0, 1.0]), array, np.array([0.0, 3.0])]).maximum(array)
    assert array.tolist() == [2, 9]
    assert list(Scripted(["a", "b", "c"]).spread(2, str)) == ["a", "b"]


@pytest.fixture(scope="module", params=[2, 3, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Arrays]:
    """(ranks, what ranks_program.py saves) under mpiexec."""
    path = tmp_path_factory.mktemp("ranks") / "results.npz"
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [mpiexec, "-n", request.param, sys.executable, "-m", "tests.kernels.ranks_program", path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(path) as file:
        return request.param, dict(file)


def part_of(results: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin so."""
    return {name.removeprefix(prefix): array for name, array in results.items() if name.startswith(prefix)}


# A part that its owner does not send, or sends before it is updated; a gradient that is summed twice, or that
# stays from the update before; a norm or a clipping factor that differs between ranks.
@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_sharded_is_plain(results: tuple[int, Arrays], model: str, optimizer: str) -> None:
    sharded, plain = (part_of(results[1], f"{model}/{optimizer}/{way}/") for way in ("sharded", "plain"))
    assert len(sharded) > 8
    assert_same_bits(sharded, plain)


# A state that lacks a rank's part, or is loaded into another one. The engine that resumes shares the other
# way.
@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_resume_is_exact(results: tuple[int, Arrays], model: str, optimizer: str) -> None:
    found = part_of(results[1], f"{model}/{optimizer}/sharded/")
    for name in ("parameters", "exp_avg", "exp_avg_sq"):
        assert_same_bits({name: found[f"resumed_{name}"]}, {name: found[name]})
    for name in ("norms", "sums"):
        assert_same_bits({name: found[f"resumed_{name}"]}, {name: found[name][1:]})


# A gradient that is summed before it is finished, or twice, or never.
@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_overlap_changes_no_bit(results: tuple[int, Arrays], model: str, optimizer: str) -> None:
    found = part_of(results[1], f"{model}/{optimizer}/sharded/")
    names = [name for name in ("parameters", "exp_avg", "exp_avg_sq", "norms", "sums") if name in found]
    assert_same_bits(
        {name: found[f"overlapped_{name}"] for name in names}, {name: found[name] for name in names}
    )


# Micro-batches that a rank leaves out or repeats; loss weights summed over one rank's part only. An engine
# alone accumulates in place, in another order of additions; against float64 both are as exact.
@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_ranks_train_as_one(results: tuple[int, Arrays], model: str, optimizer: str) -> None:
    ranks, arrays = results
    found, updates = part_of(arrays, f"{model}/{optimizer}/sharded/"), range(UPDATES)
    accum = 6 if ranks == 3 else ranks
    alone = train(make(model, optimizer), model, updates, accum)
    oracle = train(make(model, optimizer, dtype=np.float64), model, updates, accum)
    names = ("parameters", "exp_avg", "exp_avg_sq")
    got, exact, baseline = ({name: of[name] for name in names} for of in (found, oracle, alone))
    assert_calibrated(got, exact, baseline, factor=3)
    for name in ("norms", "sums"):  # a few numbers, whose error may happen to be 0
        error = float(np.abs(alone[name] - oracle[name]).max())
        rounding = UNIT[np.dtype(np.float32)] * float(np.abs(oracle[name]).max())
        assert_within(name, found[name], oracle[name], 3 * error + rounding)


# With two ranks of one micro-batch each, every gradient is one sum of two numbers. Whatever differs in a bit
# is an error: another clipping factor, a wrong step number, a weight that is updated twice.
@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_two_ranks_have_the_bits_of_one(results: tuple[int, Arrays], model: str, optimizer: str) -> None:
    ranks, arrays = results
    if ranks != 2:
        pytest.skip("a sum of more numbers has several orders")
    engine, twin = make(model, optimizer), make(model, optimizer)
    norms, sums = [], []
    for update in range(UPDATES):
        batches = [micro_batch(model, 2 * update + i) for i in range(2)]
        scale = head_scale(engine, batches)
        twin.load_state(engine.state())
        for one, batch in zip((engine, twin), batches, strict=True):
            one.micro_step(batch, scale)
        for name in ("gradients", "nll_sums"):
            engine._arena.whole(name)[...] += twin._arena.whole(name)
        result = engine.update(LR)
        norms.append(result.grad_norm)
        sums.append(result.nll_sums)
    expected = engine.state() | {"norms": np.array(norms), "sums": np.array(sums)}
    del expected["step"]
    found = part_of(arrays, f"{model}/{optimizer}/sharded/")
    assert_same_bits({name: found[name] for name in expected}, expected)
