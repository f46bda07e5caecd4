"""Loss, its gradient by the logits, the update and the draw on the GPU against the CPU's."""

import math
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.cpu import CpuOps
from kernels.cpu.adamw import adamw
from kernels.cpu.cross_entropy import cross_entropy_backward, cross_entropy_forward
from kernels.cpu.grad_norm import grad_norm, square_sums
from kernels.cpu.muon import muon
from kernels.cpu.sample import sample as cpu_sample
from kernels.cpu.weighted_sum import weighted_sum_forward
from kernels.optimizers import Matrices
from kernels.parameters import GROUP_SHIFT, GROUPS, MUON
from tests.cases import CROSS_ENTROPY, GRADIENTS
from tests.compare import Array, Arrays, assert_same_bits, normal
from tests.cuda import BF16, FLOAT, STORAGES, Gpu, Side, assert_calibrated_op, gpu, on_gpu, on_host, rounded

pytestmark = pytest.mark.gpu

storages = pytest.mark.parametrize("storage", STORAGES, ids=["fp32", "bf16"])

# Rows without 16-byte vectors, a tail of the vocabulary in the last vector, and the sizes of models.
VOCABULARIES = (
    *CROSS_ENTROPY,
    (3, 61, 61),
    (5, 509, 512),
    (4, 4096, 4096),
    (3, 50257, 50304),
    (2, 50304, 50304),
)


def cross_entropy(side: Side, a: Arrays) -> Arrays:
    """Both passes."""
    rows, sizes = len(a["targets"]), {"vocab_size": int(a["vocab_size"]), "softcap": float(a["softcap"])}
    logits, dlogits, targets = side.stored(a["logits"]), side.stored(a["logits"]), side.same(a["targets"])
    nll, again = side.single(np.full(rows, np.nan)), side.single(np.full(rows, np.nan))
    correct = side.same(np.arange(rows) % 2 == 0)
    side(cross_entropy_forward, nll, correct, logits, targets, **sizes)
    side(cross_entropy_backward, dlogits, again, targets, side.single(a["weight"]), **sizes)
    return {"nll": nll, "correct": correct, "nll_again": again, "dlogits": dlogits}


def cross_entropy_inputs(rows: int, vocab_size: int, padded: int, spread: float, softcap: float) -> Arrays:
    """Every second target the likeliest token; rows of weight 0 first; NaN in the padding."""
    rng = np.random.default_rng([rows, vocab_size])
    logits = spread * normal(rng, rows, padded)
    targets = rng.integers(vocab_size, size=rows, dtype=np.int32)
    targets[::2] = logits[::2, :vocab_size].argmax(axis=1)
    logits[:, vocab_size:] = np.nan
    weight = np.abs(normal(rng, rows))
    weight[: rows // 3] = 0
    return {"logits": logits, "targets": targets, "weight": weight, "vocab_size": np.array(vocab_size),
            "softcap": np.array(softcap)}  # fmt: skip


# A tail that no thread reads, padding that takes part, a maximum that is rescaled by the wrong one, or a row
# that is written before its target was read. Logits of 1e4: exp of an unshifted one overflows.
@storages
@pytest.mark.parametrize(("spread", "softcap"), [(3.0, 0.0), (1e4, 0.0), (3.0, 15.0), (1e4, 15.0)])
@pytest.mark.parametrize("shape", VOCABULARIES)
def test_cross_entropy(shape: tuple[int, int, int], spread: float, softcap: float, storage: Any) -> None:
    a = cross_entropy_inputs(*shape, spread, softcap)
    size = 2 * float(np.abs(a["logits"][:, : shape[1]]).max())
    scale = {"nll": size, "nll_again": size, "dlogits": float(a["weight"].max())}
    assert_calibrated_op(cross_entropy, a, storage, single=("nll", "nll_again"), scale=scale)
    side = Gpu(storage)
    dlogits = side.host(cross_entropy(side, a)["dlogits"])
    assert not dlogits[:, shape[1] :].any()
    assert not dlogits[a["weight"] == 0].any()


# The offset of a row as an int: 43,000 rows of 50,304 are more than 2^31 elements.
@pytest.mark.slow
def test_cross_entropy_past_2_to_31() -> None:
    rows, width, vocab_size = 43_000, 50_304, 50_257
    side = Gpu(STORAGES[1])
    logits = (
        side.device.allocate(rows * width * 2).view(np.uint16).reshape(rows, width)
    )  # zeros: every token alike
    targets, weight = side.same(np.full(rows, 7, np.int32)), side.single(np.ones(rows))
    nll = side.single(np.full(rows, np.nan))
    side(cross_entropy_backward, logits, nll, targets, weight, vocab_size=vocab_size, softcap=0.0)
    np.testing.assert_allclose(side.host(nll), math.log(vocab_size), rtol=1e-6)
    last = side.host(logits[-1:])[0]
    assert last[7] == rounded(np.array([1 / vocab_size - 1]), STORAGES[1])[0]
    np.testing.assert_allclose(last[8:vocab_size], 1 / vocab_size, rtol=2.0**-8)
    assert not last[vocab_size:].any()


# A sum that overwrites, one in fp32, a row left out, and 0 * NaN, which would hide the loss of all rows.
@pytest.mark.parametrize("rows", [1, 31, 1024, 1025, 32768, 100_003])
def test_weighted_sum(rows: int) -> None:
    rng = np.random.default_rng(rows)
    nll, weight = np.abs(normal(rng, rows)), np.abs(normal(rng, rows))
    weight[rng.random(rows) < 0.2] = 0
    exact = 2.5 + math.fsum(weight * nll)
    nll[(weight == 0) & (rng.random(rows) < 0.5)] = np.nan
    side, totals = Gpu(STORAGES[0]), []
    for _ in range(2):
        total = side.same(np.array(2.5))
        side(weighted_sum_forward, total, side.single(nll), side.single(weight))
        totals.append(side.host(total))
    assert float(totals[0]) == pytest.approx(exact, rel=1e-14)
    assert_same_bits({"total": totals[1]}, {"total": totals[0]})


def norm_of(side: Side, a: Arrays) -> Arrays:
    """The gradient's norm."""
    norm = side.same(np.array(np.nan))
    sums = side.single(np.full(-(-a["grads"].size // side.ops().norm_chunk), np.nan))
    side(square_sums, sums, side.single(a["grads"]))
    side(grad_norm, norm, sums)
    return {"norm": norm}


# The last, partial chunk left out, or its border counted twice.
@pytest.mark.parametrize("size", [*GRADIENTS, 16383, 16384, 16385, 1_000_003])
def test_grad_norm(size: int) -> None:
    a = {"grads": normal(np.random.default_rng(size), size)}
    assert_calibrated_op(norm_of, a, STORAGES[0], single=("norm",))


# A NaN or an infinity that the sum loses, in a whole chunk and in the last, would let the update spoil every
# parameter.
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("place", [7777, 19_999])
def test_what_is_not_finite_shows(value: float, place: int) -> None:
    grads = np.ones(20_000)
    grads[place] = value
    side = Gpu(STORAGES[0])
    assert not np.isfinite(side.host(norm_of(side, {"grads": grads})["norm"]))


CONSTANTS: dict[str, Any] = {
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "lr_scales": (1.0, 3.0, 0.5, 2.0),
}


def update_inputs(run: int, runs: int) -> Arrays:
    """Three gradients; segments of every group decay or not, and are cleared or not."""
    rng, size = np.random.default_rng([run, runs]), run * runs
    grads = {f"grads{step}": normal(rng, size) for step in (1, 2, 3)}
    flags = np.arange(runs) % 4 + (np.arange(runs) // 4 % len(GROUPS) << GROUP_SHIFT)
    return {"params": normal(rng, size), "flags": flags.astype(np.uint8), **grads}


def updates(side: Side, a: Arrays, grad_clip: float, copies: bool = True) -> Arrays:
    """Three updates from the start."""
    size = a["params"].size
    params, exp_avg, exp_avg_sq = (
        side.single(a["params"]),
        side.single(np.zeros(size)),
        side.single(np.zeros(size)),
    )
    compute_weights = side.stored(np.full(size, np.nan)) if copies else None
    flags, lr = side.same(a["flags"]), side.same(np.array(1e-2))
    for step in (1, 2, 3):
        grads, norm = side.single(a[f"grads{step}"]), side.same(np.array(1.5 * step))
        side(
            adamw, params, exp_avg, exp_avg_sq, grads, compute_weights, flags, norm, lr,
            side.same(np.array(step, np.int64)), **CONSTANTS, grad_clip=grad_clip,
        )  # fmt: skip
    result = {"params": params, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grads": grads}
    return result if compute_weights is None else {**result, "compute_weights": compute_weights}


# Runs without vectors; more elements than the grid has threads; a bias correction in fp32, a decay or a clip
# of the wrong element, a gradient that stays.
@storages
@pytest.mark.parametrize("grad_clip", [0.0, 2.0])
@pytest.mark.parametrize("shape", [(64, 9), (1, 7), (6, 11), (64, 40_000)])
def test_adamw(shape: tuple[int, int], grad_clip: float, storage: Any) -> None:
    a = update_inputs(*shape)
    single = ("params", "exp_avg", "exp_avg_sq", "grads")
    assert_calibrated_op(
        lambda side, arrays: updates(side, arrays, grad_clip), a, storage, single=single, exact=("grads",)
    )


# Weights as products read them that are not the parameters' rounding; an update that depends on whether there
# are any.
@storages
def test_adamw_copy(storage: Any) -> None:
    a, side = update_inputs(64, 9), Gpu(storage)
    got = on_host(side, updates(side, a, 1.0))
    np.testing.assert_array_equal(got.pop("compute_weights"), rounded(got["params"], storage))
    assert_same_bits(on_host(side, updates(side, a, 1.0, copies=False)), got)


# A run of Muon's that is written, or the neighbour of one that is not.
@storages
def test_adamw_leaves_muons_runs(storage: Any) -> None:
    a, side = update_inputs(64, 8), Gpu(storage)
    mixed = {**a, "flags": np.where(np.arange(8) < 4, a["flags"], a["flags"] | MUON).astype(np.uint8)}
    got, plain = (on_host(side, updates(side, arrays, 1.0)) for arrays in (mixed, a))
    before = {"params": a["params"], "grads": a["grads3"], "compute_weights": np.full(512, np.nan)}
    for name, array in got.items():
        assert_same_bits({name: array[:256]}, {name: plain[name][:256]})
        np.testing.assert_array_equal(array[256:], before.get(name, np.zeros(512))[256:])


# Layers, a layer's matrices, and of these wide and square, tall and odd ones; chunks of elements that are
# whole, partial and several; layers that lie at multiples of 16 bytes, and that do not.
MATRICES = ((2, 2, 64, 128), (3, 1, 128, 128), (1, 2, 344, 128), (2, 3, 17, 43))


def place(shape: Array) -> Matrices:
    """Where such matrices lie in a flat array, with a gap of a few elements between layers."""
    layers, count, m, n = (int(extent) for extent in shape)
    return Matrices((layers, count, m, n), offset=8, stride=count * m * n + 8 + m % 2)


def muon_inputs(shape: tuple[int, int, int, int]) -> Arrays:
    """Flat arrays. Gradient and momentum have no singular values below a tenth: smaller ones' rounding grows
    without bound.
    """
    rng, k, matrices = np.random.default_rng(shape), min(shape[2:]), place(np.array(shape))
    arrays = {
        name: rng.standard_normal(8 + shape[0] * matrices.stride) for name in ("params", "exp_avg", "grads")
    }
    for i in np.ndindex(shape[:2]):
        u, _, vt = np.linalg.svd(rng.standard_normal(shape[2:]), full_matrices=False)
        for name in ("exp_avg", "grads"):
            matrices.view(CpuOps(), arrays[name])[i] = (
                (1 + sum(i)) * (u * rng.permutation(np.linspace(0.1, 1, k))) @ vt
            )
    return {**arrays, "params": 0.1 * arrays["params"], "shape": np.array(shape)}


def muon_update(side: Side, a: Arrays) -> Arrays:
    """One update that is clipped."""
    matrices, names = place(a["shape"]), ("params", "exp_avg", "grads")
    layers, count, m, n = matrices.shape
    sizes, k = (layers * count, m, n), min(m, n)
    flat = [*(side.single(a[name]) for name in names), side.stored(np.full(a["params"].shape, 7.0))]
    scratch = [
        side.stored(np.full(size, np.nan)) for size in (sizes, sizes, (sizes[0], k, k), (sizes[0], k, k))
    ]
    norm, lr = side.same(np.array(a.get("norm", 2.0))), side.same(np.array(0.5))
    side(
        muon,
        *(matrices.view(side.ops(), array) for array in flat),
        *scratch,
        norm,
        lr,
        weight_decay=0.1,
        grad_clip=1.0,
    )
    return dict(zip((*names, "compute_weights"), flat, strict=True))


@pytest.fixture(params=("custom", "cublaslt"))
def _products(
    request: pytest.FixtureRequest, storage: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The GPU's products by either backend; the CPU's in fp32 rounded wherever the GPU's are."""
    pytest.importorskip("cupy")
    from kernels.cuda.matmul import cublaslt

    cpu = import_module("kernels.cpu.muon")  # the package's name of it is the function

    def rounding(op: Any) -> Any:
        def rounded_op(out: Array, *rest: Any, **options: Any) -> None:
            op(out, *rest, **options)
            if out.dtype == np.float32:
                out[...] = rounded(out, storage)

        return rounded_op

    def iterate(out: Array, gram: Array, poly: Array, x: Array) -> None:
        if x.dtype == np.float32:
            x[...] = rounded(x, storage)
        first(out, gram, poly, x)

    first = cpu.iterate
    monkeypatch.setattr(cpu, "iterate", iterate)
    for name in ("matmul_forward", "weight_gradient", "input_gradient", "_polynomial"):
        monkeypatch.setattr(cpu, name, rounding(getattr(cpu, name)))
    monkeypatch.setattr(gpu(), "matmul", request.param, raising=False)
    monkeypatch.setattr(gpu(), "precision", "bf16" if storage == BF16 else "fp32", raising=False)
    monkeypatch.setattr(cublaslt, "user_cache", lambda: tmp_path)


# A momentum, norm or polynomial that misses elements or is another matrix's, the wrong one of a matrix and
# its transpose, a decay or a rate of another element, one between layers that is written. The order of sums
# differs.
@storages
@pytest.mark.usefixtures("_products")
@pytest.mark.parametrize("shape", MATRICES)
def test_muon(shape: tuple[int, int, int, int], storage: Any) -> None:
    a, matrices, side, cpu = muon_inputs(shape), place(np.array(shape)), Gpu(storage), CpuOps()
    single, sums = ("exp_avg", "grads"), ("params", "compute_weights")
    assert_calibrated_op(muon_update, a, storage, single=single, sums=sums, exact=("grads",))
    got = on_host(side, muon_update(side, a))
    np.testing.assert_array_equal(
        matrices.view(cpu, got["compute_weights"]), rounded(matrices.view(cpu, got["params"]), storage)
    )
    between = {name: a[name].astype(np.float32) for name in a if name != "shape"} | {
        "compute_weights": np.full_like(got["compute_weights"], 7)
    }
    for name, array in between.items():
        matrices.view(cpu, array)[...] = matrices.view(cpu, got[name])
    assert_same_bits(got, between)


# The momentum is kept for good: one update by a gradient that overflowed would spoil all that follow.
@storages
@pytest.mark.parametrize("norm", [np.nan, np.inf])
def test_muon_changes_nothing_where_the_norm_is_not_finite(
    norm: float, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, side = {**muon_inputs((2, 3, 17, 43)), "norm": np.array(norm)}, Gpu(storage)
    monkeypatch.setattr(gpu(), "matmul", "custom", raising=False)
    got = on_host(side, muon_update(side, a))
    before = {name: a[name].astype(np.float32) for name in a if name in got}
    assert_same_bits(got, {**before, "compute_weights": np.full_like(got["compute_weights"], 7)})


# One update by a gradient that overflowed spoils every parameter; one that clears it hides the tensor at
# fault.
@storages
@pytest.mark.parametrize("norm", [np.nan, np.inf])
def test_adamw_changes_nothing_where_the_norm_is_not_finite(norm: float, storage: Any) -> None:
    rng, side = np.random.default_rng(0), Gpu(storage)
    names = ("params", "exp_avg", "exp_avg_sq", "grads")
    arrays = {
        **{name: side.single(normal(rng, 640)) for name in names},
        "compute_weights": side.stored(normal(rng, 640)),
    }
    before = on_host(side, arrays)
    scalars = (side.same(np.full(10, 3, np.uint8)), side.same(np.array(norm)), side.same(np.array(1e-2)))
    side(adamw, *arrays.values(), *scalars, side.same(np.array(1, np.int64)), **CONSTANTS, grad_clip=1.0)
    assert_same_bits(on_host(side, arrays), before)


def draw(logits: Array, uniform: Array, storage: Any, vocab_size: int, **settings: Any) -> Array:
    """The GPU's tokens, the same twice."""
    from kernels.cuda.sample import sample

    device = gpu()
    on_device, draws = on_gpu(device, logits, storage), on_gpu(device, uniform, np.float64)
    tokens = []
    for _ in range(2):
        out = on_gpu(device, np.full(len(logits), -1), np.int32)
        sample(device, out, on_device, draws, vocab_size=vocab_size, **settings)
        tokens.append(device.download(out))
    np.testing.assert_array_equal(tokens[1], tokens[0])
    return tokens[0]


def rows_of_logits(vocab_size: int, width: int, storage: Any) -> Array:
    """As of a model; with many ties; all equal; with banned tokens and zeros of either sign. The padding is
    the likeliest.
    """
    rng = np.random.default_rng(vocab_size)
    logits = 3 * normal(rng, 4, width)
    logits[1] = np.round(logits[1])
    logits[2] = 0.25
    logits[3, rng.random(width) < 0.4] = 0.0
    logits[3, rng.random(width) < 0.2] = -0.0
    logits[3, 1:][rng.random(width - 1) < 0.3] = -np.inf
    logits[:, vocab_size:] = 1e9
    return rounded(logits, storage)


# A rank that ignores the id among equals, a prefix off by one, padding that is drawn, a cut that forgets the
# one before it.
@storages
@pytest.mark.parametrize(
    ("vocab_size", "width"),
    [(1, 1), (7, 8), (61, 128), (1024, 1024), (1025, 1032), (5003, 5003), (50257, 50304)],
)
def test_sampling_is_the_cpus(vocab_size: int, width: int, storage: Any) -> None:
    logits, rng = rows_of_logits(vocab_size, width, storage), np.random.default_rng(0)
    for temperature, top_k, top_p, softcap in product(
        (0.0, 0.5, 1.0, 3.0), (0, 1, 5, 1024, 2000), (1.0, 0.9, 0.3, 1e-9), (0.0, 15.0)
    ):
        settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        settings["softcap"] = softcap
        uniform = rng.random(4)
        expected = np.full(4, -1, np.int32)
        cpu_sample(expected, logits, uniform, vocab_size=vocab_size, **settings)
        got = draw(logits, uniform, storage, vocab_size, **settings)
        np.testing.assert_array_equal(got, expected, err_msg=f"{settings} {uniform}")


# A token that is banned has no probability, whatever is added to its logit.
@storages
def test_sampling_never_draws_what_is_banned(storage: Any) -> None:
    rng = np.random.default_rng(1)
    logits = normal(rng, 64, 3000)
    banned = np.asarray(rng.random(logits.shape) < 0.5)
    logits[banned] = -np.inf
    settings = {"softcap": 15.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    tokens = draw(logits, rng.random(64), storage, 3000, **settings)
    assert not banned[np.arange(64), tokens].any()


# A draw that is baked into the graph would repeat for ever.
@storages
def test_sampling_in_a_graph(storage: Any) -> None:
    from kernels.cuda.sample import sample

    device, vocab_size, width = gpu(), 5003, 5008
    logits = rows_of_logits(vocab_size, width, storage)
    on_device, uniform = on_gpu(device, logits, storage), on_gpu(device, np.zeros(4), np.float64)
    out = on_gpu(device, np.zeros(4), np.int32)
    settings: dict[str, Any] = {"softcap": 0.0, "temperature": 0.8, "top_k": 0, "top_p": 0.95}
    graphs = device.new_graphs()
    for seed in range(4):
        host = np.random.default_rng(seed).random(4)
        device.upload(uniform, host)
        device.replay(
            graphs,
            "sample",
            lambda: sample(device, out, on_device, uniform, vocab_size=vocab_size, **settings),
        )
        expected = np.empty(4, np.int32)
        cpu_sample(expected, logits, host, vocab_size=vocab_size, **settings)
        np.testing.assert_array_equal(device.download(out), expected)


# Weights that products read rounded otherwise than the update rounds them, or a tail that is not written.
@pytest.mark.parametrize("size", [1, 8, 4097, 100_000])
def test_rounding(size: int) -> None:
    from kernels.cuda.cast import cast

    host = np.random.default_rng(size).standard_normal(size, np.float32)
    host[:: size // 2 + 1] = (1 + 2.0**-8) * np.float32(-3.0)  # half-way between two numbers of bf16
    out = on_gpu(gpu(), np.full(size, np.nan), BF16)
    cast(gpu(), out, on_gpu(gpu(), host, FLOAT))
    assert np.array_equal(gpu().download(out), rounded(host, BF16))
