"""Ranks on the GPU: two engines on one GPU whose collectives are additions and copies, and NCCL with one rank.

NCCL refuses two ranks on one GPU. So the engines run in two threads, and `Together` stands for NCCL. An engine
belongs to one thread, and some state of cuBLASLt to the process: the threads take turns, and change over when
one waits for the other.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kernels import engine as engine_module
from kernels.config import Matmul, ModelConfig, Numerics, Precision
from kernels.engine import Engine
from kernels.optimizers import OPTIMIZERS
from kernels.ranks import ALONE, Link, Ranks
from tests.bench.engine import GPT2
from tests.compare import Arrays, assert_same_bits
from tests.cuda import gpu
from tests.kernels.ranks_program import LR, head_scale, micro_batch_of

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"vocab_size": 500, "layers": 3, "heads": 2, "dim": 128, "ffn": 352, "context": 64}
MODELS = {
    "euler": ModelConfig(**SIZES, kv_heads=1, mtp_heads=2),
    "gpt2": ModelConfig(**SIZES, kv_heads=2, **GPT2),
}
UPDATES = 3


@pytest.fixture(autouse=True)
def _gpu() -> None:
    gpu()


class Shared:
    """What the threads exchange."""

    def __init__(self, size: int) -> None:
        self.barrier, self.turn = threading.Barrier(size, timeout=60), threading.Lock()
        self.slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """The value of every rank."""
        _wait_for_gpu()
        self.turn.release()
        self.barrier.wait()
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        self.turn.acquire()
        return found


class ThreadLink:
    """The link of a thread."""

    local_rank, note = 0, ""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self.rank, self.size = shared, rank, len(shared.slots)

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """See kernels.ranks.Link."""
        return [row[self.rank] for row in self.shared.exchange(self.rank, list(values))]

    def fail(self, error: str) -> None:
        """Not called here."""

    def close(self) -> None:
        """Not called here."""


class Together(Ranks):
    """The collectives of engines in one process."""

    def __init__(self, link: Any, ops: Any) -> None:
        super().__init__(link)
        self._ops = ops

    def _all(self, array: Any) -> list[Any]:
        """Copies of the ranks' arrays."""
        found = [one.copy() for one in self.link.shared.exchange(self.rank, array)]  # type: ignore[attr-defined]
        _wait_for_gpu()
        self.link.shared.exchange(self.rank, None)  # type: ignore[attr-defined]
        return found

    def sum(self, array: Any) -> None:
        """See Ranks."""
        parts = self._all(array)
        array[...] = sum(parts[1:], parts[0])
        _wait_for_gpu()

    def maximum(self, array: Any) -> None:
        """See Ranks."""
        import cupy

        array[...] = cupy.maximum(*self._all(array))
        _wait_for_gpu()

    def reduce_scatter(self, flat: Any, bounds: Sequence[int]) -> None:
        """See Ranks."""
        parts = self._all(flat)
        own = slice(bounds[self.rank], bounds[self.rank + 1])
        flat[own] = sum((part[own] for part in parts[1:]), parts[0][own])
        _wait_for_gpu()

    def all_gather(self, flat: Any, bounds: Sequence[int]) -> None:
        """See Ranks."""
        for (begin, end), part in zip(pairwise(bounds), self._all(flat), strict=True):
            flat[begin:end] = part[begin:end]
        _wait_for_gpu()

    def broadcast(self, array: Any, root: int = 0) -> None:
        """See Ranks."""
        array[...] = self._all(array)[root]
        _wait_for_gpu()


def _wait_for_gpu() -> None:
    import cupy

    cupy.cuda.Device().synchronize()


def make(model: str, optimizer: str, precision: Precision, link: Link = ALONE, **kind: Any) -> Engine:
    """An engine that records no graphs: threads cannot wait for each other in a recording.

    cuBLASLt multiplies matrices of one shape by an algorithm that depends on their number, which is another for
    a rank under Muon. Our own kernels multiply each by itself.
    """
    matmul: Matmul = "custom" if optimizer == "muon" else "cublaslt"
    engine = Engine(
        MODELS[model], Numerics(precision=precision, matmul=matmul), micro_batch=2, device="cuda", link=link,
        optimizer=OPTIMIZERS[optimizer](grad_clip=0.5), **kind,
    )  # fmt: skip
    engine.ops.replay = lambda graphs, key, work: work()  # type: ignore[method-assign]
    return engine


def update(engine: Engine, model: str, number: int, micro_batches: Sequence[int]) -> Arrays:
    """One update, of which this engine makes these micro-steps."""
    batches = [micro_batch_of(MODELS[model], 2 * number + i) for i in range(2)]
    scale = head_scale(engine, batches)
    for i in micro_batches:
        engine.micro_step(batches[i], scale, last=i == micro_batches[-1])
    engine.reduce()
    result = engine.update(LR)
    return {"norm": np.array(result.grad_norm), "sums": result.nll_sums}


def in_threads(work: Callable[[ThreadLink], Arrays], size: int = 2) -> Arrays:
    """The work of every rank; what rank 0 returns."""
    shared = Shared(size)

    def in_turn(rank: int) -> Arrays:
        with shared.turn:
            return work(ThreadLink(shared, rank))

    with ThreadPoolExecutor(size) as pool:
        return next(iter(list(pool.map(in_turn, range(size)))))


# A master weight, a moment, an embedding's copy or an FP8 scale that is not its owner's; gradients that the
# next update finds where another rank cleared them. With two ranks a sum has one order, so the bits are those
# of one engine that adds the other's gradients by hand, sharded or not.
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [("adamw", "fp32"), ("adamw", "bf16"), ("adamw", "fp8"), ("muon", "fp32"), ("muon", "bf16")],
)
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_are_one(
    model: str, optimizer: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "open_ranks", lambda link, ops: Together(link, ops))
    sharded, plain = (
        in_threads(lambda link, on=on: trained(model, optimizer, precision, link, on))  # type: ignore[misc]
        for on in (True, False)
    )
    assert_same_bits(sharded, plain)
    monkeypatch.undo()
    if precision != "fp8":  # whose maxima lie in every layer's weights
        assert_same_bits(sharded, added_by_hand(model, optimizer, precision))


def trained(model: str, optimizer: str, precision: Precision, link: ThreadLink, sharded: bool) -> Arrays:
    """Updates, with a state saved and loaded in the middle, and all that rank 0 holds afterwards."""
    engine, found = make(model, optimizer, precision, link, shard_optimizer=sharded), dict[str, Any]()
    for number in range(UPDATES):
        result = update(engine, model, number, [link.rank])
        found |= {f"{key} {number}": array for key, array in result.items()}
        if number == 0:
            state = engine.state()
            engine = make(model, optimizer, precision, link, shard_optimizer=sharded, seed=7)
            engine.load_state(state if link.rank == 0 else None)
    return found | engine.state() | engine.weights()


def added_by_hand(model: str, optimizer: str, precision: Precision) -> Arrays:
    """The same updates on one engine, to whose gradients those of a twin are added."""
    engine, twin, found = (
        make(model, optimizer, precision),
        make(model, optimizer, precision),
        dict[str, Any](),
    )
    for number in range(UPDATES):
        batches = [micro_batch_of(MODELS[model], 2 * number + i) for i in range(2)]
        scale = head_scale(engine, batches)
        twin.load_state(engine.state())
        for one, batch in zip((engine, twin), batches, strict=True):
            one.micro_step(batch, scale)
            one.ops.synchronize()
        for name in ("gradients", "nll_sums"):
            engine._arena.whole(name)[...] += twin._arena.whole(name)
        _wait_for_gpu()
        result = engine.update(LR)
        found |= {f"norm {number}": np.array(result.grad_norm), f"sums {number}": result.nll_sums}
    return found | engine.state() | engine.weights()


# A collective of NCCL that is given another length, type or stream, or does not survive a recorded update.
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nccl_with_one_rank_changes_no_bit(
    optimizer: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy.cuda.nccl")
    from kernels.cuda.nccl import NcclRanks

    states = []
    for ranks, overlap in ((None, False), (NcclRanks, False), (NcclRanks, True)):
        if ranks:
            monkeypatch.setattr(engine_module, "open_ranks", ranks)
        engine = Engine(
            MODELS["euler"], Numerics(precision=precision), micro_batch=2, device="cuda",
            optimizer=OPTIMIZERS[optimizer](), overlap=overlap,
        )  # fmt: skip
        sums = [update(engine, "euler", number, [0, 1]) for number in range(5)]
        states.append({**engine.state(), **sums[-1]})
    assert_same_bits(states[1], states[0])
    assert_same_bits(states[2], states[0])
