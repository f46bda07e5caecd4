"""The whole engine on the GPU against the CPU's float64."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from kernels.batch import Batch, head_weight_sums
from kernels.config import ModelConfig, Numerics
from kernels.cpu.fp8 import fp8
from kernels.engine import Engine
from kernels.generation import Sampling, generate_batch
from kernels.memory import memory_plan
from kernels.optimizers import OPTIMIZERS
from tests.compare import Array, Arrays, assert_same_bits, from_fp8
from tests.cuda import BF16, UNIT, gpu, rounded
from tests.gradient_check import MODELS, make_problem

pytestmark = pytest.mark.gpu

# Sizes that tensor cores take, with documents and heads that are shared; and the odd ones of the gradient
# check.
SIZES: dict[str, Any] = {"vocab_size": 300, "layers": 3, "dim": 128, "ffn": 256, "context": 150}
LARGE = {
    "euler": ModelConfig(**SIZES, heads=4, kv_heads=2, mtp_heads=3),
    "gpt2": ModelConfig(
        **SIZES,
        heads=2,
        kv_heads=2,
        norm="layernorm",
        position="learned",
        mlp="gelu",
        bias=True,
        tied_head=True,
    ),
    "qwen3": ModelConfig(**SIZES, heads=2, kv_heads=1, tied_head=True, qk_norm="weighted"),
}
CASES = [*(("odd", name) for name in MODELS), *(("large", name) for name in LARGE)]


@pytest.fixture(autouse=True)
def _gpu() -> None:
    gpu()


def engine_on_gpu(
    config: ModelConfig, weights: Arrays | None = None, optimizer: str = "adamw", **numerics: Any
) -> Engine:
    """An engine on the GPU with these weights, or the initial ones; the test is skipped where it has no FP8
    and should.
    """
    if numerics.get("precision") == "fp8" and int(gpu().arch[3:]) < 89:
        pytest.skip(f"{gpu().arch} has no FP8 products")
    engine = Engine(
        config, Numerics(**numerics), micro_batch=3, device="cuda", optimizer=OPTIMIZERS[optimizer]()
    )
    if weights is not None:
        engine.load(weights)
    return engine


def batch_of(config: ModelConfig, seed: int, rows: int = 3) -> Batch:
    """Random tokens in documents, some targets unweighted."""
    rng, shape = np.random.default_rng(seed), (rows, config.context)
    tokens = rng.integers(config.vocab_size, size=(rows, config.context + 1), dtype=np.int32)
    document = np.cumsum(rng.random(shape) < 0.02, axis=1, dtype=np.int32)
    weight = (rng.random(shape) * (rng.random(shape) < 0.8)).astype(np.float32)
    return Batch(np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), document, weight)


def error(got: Array, expected: Array) -> float:
    """The norm of the difference, relative to that of what was expected."""
    return float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected))


def gradients(engine: Engine, batch: Batch, scale: Array) -> Arrays:
    """Of one micro-step."""
    engine.micro_step(batch, scale)
    return engine.gradients()


# Any kernel that computes something else than its CPU twin, and any array handed to the wrong one. A GPT-2
# key bias has no gradient by nature: the query's and value's rows of that tensor are what is compared.
@pytest.mark.parametrize(("size", "name"), CASES)
@pytest.mark.parametrize(
    "numerics", [{}, {"recompute": "mlp"}, {"attention": "scalar"}, {"matmul": "custom"}]
)
def test_fp32_gradients(size: str, name: str, numerics: dict[str, Any]) -> None:
    if size == "odd":
        problem = make_problem(MODELS[name], seed=0)
        config, batch, scale, oracle = MODELS[name], problem.batch, problem.head_scale, problem.engine
    else:
        config, batch = LARGE[name], batch_of(LARGE[name], seed=1)
        scale = 1 / config.mtp_heads / head_weight_sums(batch, config.mtp_heads)
        oracle = Engine(config, Numerics(), micro_batch=3, device="cpu", dtype=np.float64)
    expected = gradients(oracle, batch, scale)
    got = gradients(engine_on_gpu(config, oracle.weights(), **numerics), batch, scale)
    errors = {tensor: error(got[tensor], expected[tensor]) for tensor in expected}
    assert max(errors.values()) <= 1e-5, errors


class RoundingOps:
    """A CPU engine's operations, each of whose results that a bf16 engine stores in 16 bits is rounded to
    them.
    """

    def __init__(self, engine: Engine, config: ModelConfig) -> None:
        self.ops, arena = engine.ops, engine._arena
        plan = memory_plan(config, Numerics(), engine.micro_batch, storage=BF16)
        stored = {buffer.name for buffer in plan if buffer.dtype == BF16 and buffer.name in arena}
        flat = [array for (name, _), array in arena._flat.items() if name in stored]
        self.places = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in flat]

    def __getattr__(self, name: str) -> Any:
        op = getattr(self.ops, name)
        if not name.endswith(("_forward", "_backward")):
            return op

        def rounding(*arguments: Any, **options: Any) -> None:
            op(*arguments, **options)
            for array in arguments:
                if isinstance(array, np.ndarray) and any(
                    low <= array.ctypes.data < high for low, high in self.places
                ):
                    array[...] = rounded(array, BF16)

        return rounding


def bf16_baseline(
    config: ModelConfig, weights: Arrays, batch: Batch, scale: Array, ops: Any = RoundingOps
) -> Arrays:
    """Gradients as the CPU computes them in fp32 where everything is rounded that a bf16 engine, or another,
    rounds.
    """
    engine = Engine(config, Numerics(), micro_batch=3, device="cpu")
    engine.load(weights)
    engine._model.tensors.compute_weights = {name: rounded(weight, BF16) for name, weight in weights.items()}
    engine.use_ops(ops(engine, config))
    return gradients(engine, batch, scale)


# bf16, by the calibrated rule: an error of at most thrice what rounding the same arrays costs the CPU, tensor
# by tensor.
@pytest.mark.parametrize(("size", "name"), CASES)
@pytest.mark.parametrize("numerics", [{}, {"attention": "scalar"}, {"matmul": "custom"}])
def test_bf16_gradients(size: str, name: str, numerics: dict[str, Any]) -> None:
    config = {"odd": MODELS, "large": LARGE}[size][name]
    batch = batch_of(config, seed=1)
    scale = 1 / config.mtp_heads / head_weight_sums(batch, config.mtp_heads)
    oracle = Engine(config, Numerics(), micro_batch=3, device="cpu", dtype=np.float64)
    weights, expected = oracle.weights(), gradients(oracle, batch, scale)
    baseline = bf16_baseline(config, weights, batch, scale)
    got = gradients(engine_on_gpu(config, weights, precision="bf16", **numerics), batch, scale)
    for tensor, value in expected.items():
        allowed = max(3 * error(baseline[tensor], value), UNIT[BF16])
        assert error(got[tensor], value) <= allowed, (
            f"{tensor}: {error(got[tensor], value):.1e}, allowed {allowed:.1e}"
        )


class Fp8Ops(RoundingOps):
    """And the products of the blocks take what is left of their factors in 8 bits."""

    def __init__(self, engine: Engine, config: ModelConfig) -> None:
        super().__init__(engine, config)
        self.blocks = {
            id(weight)
            for name, weight in engine._model.tensors.compute_weights.items()
            if name.startswith("blocks.")
        }

    def matmul_forward(self, out: Array, inp: Array, weight: Array, bias: Array | None = None) -> None:
        """Both factors."""
        factors = (cast(inp), cast(weight)) if id(weight) in self.blocks else (inp, weight)
        self.__getattr__("matmul_forward")(out, *factors, bias)

    def matmul_backward(
        self, dinp: Array, dweight: Array, dout: Array, inp: Array, weight: Array, **options: Any
    ) -> None:
        """All three."""
        factors = (cast(dout), cast(inp), cast(weight)) if id(weight) in self.blocks else (dout, inp, weight)
        self.__getattr__("matmul_backward")(dinp, dweight, *factors, **options)

    def matmul_gelu_forward(
        self, act: Array, up: Array, inp: Array, weight: Array, bias: Array | None
    ) -> None:
        """Its parts."""
        self.matmul_forward(up, inp, weight, bias)
        self.gelu_forward(act, up)

    def matmul_gelu_backward(
        self,
        dup: Array,
        dweight: Array,
        dout: Array,
        act: Array,
        up: Array,
        weight: Array,
        dbias: Array | None,
        **options: Any,
    ) -> None:
        """Its parts."""
        self.matmul_backward(dup, dweight, dout, act, weight, **options)
        self.gelu_backward(dup, dup, up)
        if dbias is not None:
            self.bias_backward(dbias, dup)


def cast(array: Array) -> Array:
    """What 8 bits and a scale keep of it."""
    out, transposed, scale = (
        np.empty(array.shape, np.uint8),
        np.empty(array.shape[::-1], np.uint8),
        np.zeros((), np.float32),
    )
    fp8(out, transposed, scale, None, array, measure=True)
    return (from_fp8(out) * scale).astype(np.float32)


# fp8: as far from float64 as a CPU that makes the same casts, up to a factor of two either way; nearer would
# be bf16's products. (Casts of what differs in its last bits differ, so the two are not near each other.)
# Also with the scales that an update before asked for, of other sizes: a batch of fewer rows. An evaluation's
# loss is bf16's own.
@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_fp8_gradients(name: str, updated: bool) -> None:
    config, batch = LARGE[name], batch_of(LARGE[name], seed=1)
    scale = 1 / config.mtp_heads / head_weight_sums(batch, config.mtp_heads)
    engine = engine_on_gpu(config, precision="fp8")
    if updated:
        engine.micro_step(batch_of(config, seed=2, rows=2), scale)
        engine.update(1e-3)
    weights, got = engine.weights(), gradients(engine, batch, scale)
    oracle = Engine(config, Numerics(), micro_batch=3, device="cpu", dtype=np.float64)
    oracle.load(weights)
    expected, baseline = gradients(oracle, batch, scale), bf16_baseline(config, weights, batch, scale, Fp8Ops)
    for tensor, value in expected.items():
        away, usual = error(got[tensor], value), error(baseline[tensor], value)
        assert usual / 2 <= away <= 2 * usual, f"{tensor}: {away:.1e}, the CPU's {usual:.1e}"
    plain = engine_on_gpu(config, weights, precision="bf16")
    assert np.array_equal(engine.evaluate(batch).nll, plain.evaluate(batch).nll)


# A captured step that keeps an old learning rate, batch or loss weight; accumulation over micro-batches; a
# resumed run. With Muon: a norm that the host waits for, which no graph holds, and a momentum that is not
# saved; with fp8 as well, weights that are cast before both optimizers are done.
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        *((precision, "adamw") for precision in ("fp32", "tf32", "bf16", "fp8")),
        ("bf16", "muon"),
        ("fp8", "muon"),
    ],
)
@pytest.mark.parametrize("name", LARGE)
def test_training_goes_on_bit_for_bit(name: str, precision: str, optimizer: str) -> None:
    config = LARGE[name]

    def train(engine: Engine, steps: range) -> list[float]:
        norms = []
        for step in steps:
            for part in range(2):
                batch = batch_of(config, seed=2 * step + part, rows=3 - part)
                engine.micro_step(batch, np.full(config.mtp_heads, 1e-3))
            norms.append(engine.update(1e-3 * (step + 1)).grad_norm)
        return norms

    whole, first, resumed = (
        engine_on_gpu(config, optimizer=optimizer, precision=precision) for _ in range(3)
    )
    norms = train(whole, range(6))
    assert np.isfinite(norms).all()
    assert train(first, range(3)) == norms[:3]
    resumed.load_state(first.state())
    assert train(resumed, range(3, 6)) == norms[3:]
    assert_same_bits(resumed.state(), whole.state())


# The update on the GPU: weights after three steps, and a loss sum that is not the step's own. A momentum of
# 0.9 in place of Muon's 0.95 changes the losses by 2e-5.
@pytest.mark.parametrize(("name", "optimizer"), [("euler", "adamw"), ("gpt2", "adamw"), ("euler", "muon")])
def test_updates_are_the_cpus(name: str, optimizer: str) -> None:
    config, batch = LARGE[name], batch_of(LARGE[name], seed=3)
    engines = (
        engine_on_gpu(config, optimizer=optimizer),
        Engine(config, Numerics(), micro_batch=3, device="cpu", optimizer=OPTIMIZERS[optimizer]()),
    )
    scale = 1 / config.mtp_heads / head_weight_sums(batch, config.mtp_heads)
    for _ in range(3):
        for engine in engines:
            engine.micro_step(batch, scale)
        ours, cpus = (engine.update(1e-3) for engine in engines)
        assert error(ours.nll_sums, cpus.nll_sums) <= 1e-5
        assert abs(ours.grad_norm / cpus.grad_norm - 1) <= 1e-4


# A non-finite gradient must leave the model as it was, with fp8 also the scales of its casts, and be named.
@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_nonfinite_gradient(precision: str) -> None:
    config = LARGE["euler"]
    engine = engine_on_gpu(config, precision=precision)
    engine.micro_step(batch_of(config, 1), np.full(config.mtp_heads, 1e-3))
    engine.update(1e-3)
    before = engine.state()
    engine.micro_step(batch_of(config, 0), np.full(config.mtp_heads, 1e38))
    assert not np.isfinite(engine.update(1e-3).grad_norm)
    assert_same_bits(engine.state(), before)
    assert (engine.first_nonfinite() or "").startswith("gradient of ")


# Losses of evaluation, and what is generated through the cache, token by token and from graphs.
@pytest.mark.parametrize("name", LARGE)
def test_evaluation_and_generation_are_the_cpus(name: str) -> None:
    config, batch = LARGE[name], batch_of(LARGE[name], seed=5)
    weights = Engine(config, Numerics(), micro_batch=3, device="cpu").weights()
    weights = {key: 3 * value if value.ndim > 1 else value for key, value in weights.items()}
    ours, cpus = engine_on_gpu(config, weights), Engine(config, Numerics(), micro_batch=3, device="cpu")
    cpus.load(weights)
    mine, theirs = ours.evaluate(batch), cpus.evaluate(batch)
    assert error(mine.nll, theirs.nll.astype(np.float64)) <= 1e-5
    assert (mine.correct != theirs.correct).mean() <= 1e-3
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11] * 40]
    greedy = [
        generate_batch(engine, prompts, Sampling(temperature=0), max_tokens=60) for engine in (ours, cpus)
    ]
    assert greedy[0] == greedy[1]


# Without training, one layer's activations are shared and no gradient is held.
def test_inference_engine() -> None:
    config = dataclasses.replace(LARGE["euler"], layers=2)
    batch, full = batch_of(config, 1), engine_on_gpu(config)
    lean = Engine(config, Numerics(), micro_batch=3, device="cuda", training=False)
    assert np.array_equal(lean.evaluate(batch).nll, full.evaluate(batch).nll)


# A slot that the host fills while a pass reads it, a token read before it was written, a graph with the other
# slot's arrays: tokens launched before the last is known are those of one after the other, up to the end of
# the context, two answers at once, rows that one kernel takes (1, 3) and rows that it does not. Stopped
# early, the engine goes on as if it had not been ahead.
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", [1, 3, 6])
@pytest.mark.parametrize("name", LARGE)
def test_draws_in_a_row_are_those_one_by_one(name: str, batch: int, precision: Any) -> None:
    config, rng = LARGE[name], np.random.default_rng(batch)
    engine = Engine(config, Numerics(precision=precision), micro_batch=batch, device="cuda", training=False)
    tokens = rng.integers(config.vocab_size, size=(batch, 3), dtype=np.int32)
    numbers, banned = rng.random((config.context - 2, batch)), np.array([5], np.int32)
    caches = [engine.decoder.cache(batch) for _ in range(3)]
    for how in ({"temperature": 0, "top_k": 0, "top_p": 1}, {"temperature": 1.0, "top_k": 90, "top_p": 0.9}):
        expected, fed = [], tokens
        for uniform in numbers:
            expected.append(engine.decoder.sample_next(fed, caches[0], uniform, banned, **how))
            fed = expected[-1][:, None]
        for _ in range(2):  # the second time from graphs alone
            running = [
                engine.decoder.sample_stream(tokens, cache, iter(numbers), banned, **how)
                for cache in caches[1:]
            ]
            for drawn in expected:
                for draws in running:
                    assert np.array_equal(next(draws), drawn)
            assert [next(draws, None) for draws in running] == [None, None]
            assert [cache.length for cache in caches] == [config.context] * 3
            for cache in caches[1:]:
                cache.truncate(0)
        draws = engine.decoder.sample_stream(tokens, caches[1], iter(numbers), banned, **how)
        assert [next(draws).tolist() for _ in range(5)] == [drawn.tolist() for drawn in expected[:5]]
        draws.close()
        assert caches[1].length == 7
        assert np.array_equal(
            engine.decoder.sample_next(expected[4][:, None], caches[1], numbers[5], banned, **how),
            expected[5],
        )
        for cache in caches:
            cache.truncate(0)
