"""The products of a linear layer on the GPU, by the library and by our own kernels, against float64 NumPy."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.cpu import matmul as cpu_matmul
from kernels.cpu.bias import bias_backward, bias_forward
from kernels.cpu.gelu import gelu_backward, gelu_forward
from kernels.cpu.matmul_gelu import matmul_gelu_backward, matmul_gelu_forward
from tests.cases import MATMUL
from tests.compare import UNIT, Array, Arrays, assert_same_bits, assert_within
from tests.cuda import STORAGES, Gpu, Side, assert_calibrated_op, on_host, truncated
from tests.cuda import gpu as calibrated_gpu

cupy = pytest.importorskip("cupy")

from kernels.cuda.matmul import cublaslt  # noqa: E402
from kernels.cuda.matmul.matmul import matmul_backward, matmul_forward  # noqa: E402
from kernels.cuda.runtime.device import Device, from_bf16, to_bf16  # noqa: E402
from kernels.cuda.runtime.launch import BF16, FLOAT  # noqa: E402

# (rows, outputs, inputs). The last three copy 16 bytes at once, the last goes through two bands of tiles.
SHAPES = (
    *MATMUL, (7, 17, 1), (1, 130, 33), (17, 7, 257), (33, 257, 7), (130, 33, 130), (257, 130, 17),
    (130, 257, 33), (136, 264, 40), (256, 128, 64), (2200, 136, 72),
)  # fmt: skip
# Terms that a tensor core adds at once, at least, before it rounds.
CORE_TERMS = 8
PRECISIONS = ("fp32", "tf32", "bf16")


@pytest.fixture(scope="module")
def gpu() -> Device:
    """The GPU, with the library's workspace."""
    try:
        device = Device()
    except ValueError as error:
        pytest.skip(str(error))
    device.use_workspace(device.allocate(cublaslt.WORKSPACE_BYTES))
    return device


@pytest.fixture(params=("custom", "cublaslt"))
def device(
    request: pytest.FixtureRequest, gpu: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Device]:
    """With either backend; the library's choices of other tests and runs are not seen."""
    gpu.matmul = request.param
    monkeypatch.setattr(cublaslt, "user_cache", lambda: tmp_path)
    cublaslt._PLANS.clear()
    yield gpu
    cublaslt._PLANS.clear()


def inputs(shape: tuple[int, int, int], precision: str) -> Arrays:
    """Random fp32 arrays, those that bf16 holds exactly where that is the precision; dweight_before is fp32
    always.
    """
    rows, outputs, width = shape
    rng = np.random.default_rng([rows, outputs, width])
    sizes: dict[str, tuple[int, ...]] = {
        "inp": (rows, width),
        "weight": (outputs, width),
        "dout": (rows, outputs),
    }
    sizes |= {"dinp_before": (rows, width), "bias": (outputs,)}
    arrays = {name: rng.standard_normal(size, np.float32) for name, size in sizes.items()}
    if precision == "bf16":
        arrays = {name: from_bf16(to_bf16(array)) for name, array in arrays.items()}
    return {**arrays, "dweight_before": rng.standard_normal((outputs, width), np.float32)}


class Case:
    """The arrays on the GPU; every output that is overwritten holds NaN at first. `shift` elements into their
    memory.
    """

    def __init__(self, device: Device, a: Arrays, precision: str, shift: int = 0) -> None:
        self.device, self.storage = device, BF16 if precision == "bf16" else FLOAT
        self.shift = shift
        device.precision = precision
        self.inp, self.weight, self.dout = (self.array(a[name]) for name in ("inp", "weight", "dout"))
        self.out, self.biased = (self.array(a["dout"] * np.nan) for _ in range(2))
        self.bias, self.dinp = self.array(a["bias"]), self.array(a["inp"] * np.nan)
        self.dinp_added = self.array(a["dinp_before"])
        self.dweight = self.array(a["dweight_before"], FLOAT)
        self.dweight_alone = self.array(a["dweight_before"] * np.nan, FLOAT)

    def array(self, host: Array, dtype: np.dtype[Any] | None = None) -> Any:
        """On the GPU, in the storage type or another."""
        array = cupy.empty(host.size + self.shift, dtype or self.storage)[self.shift :].reshape(host.shape)
        self.device.upload(array, host)
        return array

    def launch(self) -> None:
        """All three products, gradients both ways."""
        matmul_forward(self.device, self.out, self.inp, self.weight)
        matmul_forward(self.device, self.biased, self.inp, self.weight, self.bias)
        matmul_backward(self.device, self.dinp, self.dweight, self.dout, self.inp, self.weight)
        other = {"add_dinp": True, "add_dweight": False}
        matmul_backward(
            self.device, self.dinp_added, self.dweight_alone, self.dout, self.inp, self.weight, **other
        )

    def results(self) -> Arrays:
        """On the host, as fp32."""
        names = ("out", "biased", "dinp", "dinp_added", "dweight", "dweight_alone")
        return {name: self.device.download(getattr(self, name)) for name in names}


def run(device: Device, a: Arrays, precision: str, shift: int = 0) -> Arrays:
    """One pass over arrays of its own."""
    case = Case(device, a, precision, shift)
    case.launch()
    return case.results()


def summed(a: Array, b: Array, terms: int) -> Array:
    """a @ b in fp32, over k in order, `terms` at a time: one to nearest, several towards zero, as tensor
    cores do.
    """
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(0, a.shape[1], terms):
        exact = total + a[:, k : k + terms].astype(np.float64) @ b[k : k + terms].astype(np.float64)
        total = exact.astype(np.float32)
        if terms > 1:
            total = np.where(np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total)
    return total


def products(a: Arrays, multiply: Callable[[Array, Array], Array], dtype: Any) -> Arrays:
    """The specification in NumPy."""
    inp, weight, dout = (a[name].astype(dtype) for name in ("inp", "weight", "dout"))
    dinp = multiply(dout, weight)
    alone = multiply(dout.T, inp)
    dweight = a["dweight_before"].astype(dtype) + alone
    added = a["dinp_before"].astype(dtype) + dinp
    out = multiply(inp, weight.T)
    biased = out + a["bias"].astype(dtype)
    return {
        "out": out, "biased": biased, "dinp": dinp, "dinp_added": added, "dweight": dweight, "dweight_alone": alone
    }  # fmt: skip


def assert_products(got: Arrays, a: Arrays, precision: str) -> None:
    """No further from float64 than twice a NumPy product with the same roundings, thrice for dweight.

    A lucky baseline of few elements errs by nothing, so a rounding a term is allowed anyway.
    """
    oracle = products(a, np.matmul, np.float64)
    factors = {name: truncated(a[name]) for name in ("inp", "weight", "dout")} if precision == "tf32" else {}
    baseline = products(
        {**a, **factors}, partial(summed, terms=1 if precision == "fp32" else CORE_TERMS), np.float32
    )
    if precision == "bf16":
        baseline |= {
            name: from_bf16(to_bf16(baseline[name])) for name in ("out", "biased", "dinp", "dinp_added")
        }
    magnitude = products({name: np.abs(array) for name, array in a.items()}, np.matmul, np.float64)
    for name, expected in oracle.items():
        error = float(np.abs(baseline[name].astype(np.float64) - expected).max())
        floor = UNIT[np.dtype(np.float32)] * float(magnitude[name].max())
        factor = 3 if name.startswith("dweight") else 2
        assert_within(name, got[name], expected, factor * max(error, floor))


# A wrong fragment, tail, transposition or swizzle; an element left out, or added twice while candidates are
# timed.
@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(device: Device, shape: tuple[int, int, int], precision: str) -> None:
    a = inputs(shape, precision)
    first = run(device, a, precision)
    assert_products(first, a, precision)
    assert_same_bits(run(device, a, precision), first)


# A kernel, or an algorithm, that takes an address to be a multiple of 16 bytes which is not.
@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shift", [1, 2])
def test_arrays_that_begin_anywhere(device: Device, precision: str, shift: int) -> None:
    a = inputs((136, 264, 40), precision)
    assert_products(run(device, a, precision, shift), a, precision)


# A product that allocates, synchronizes or plans when a graph captures it, or does something else there.
@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_in_a_graph(device: Device, precision: str) -> None:
    a = inputs((136, 264, 40), precision)
    expected, case = run(device, a, precision), Case(device, a, precision)
    graphs = device.new_graphs()
    for _ in range(3):  # launched, captured and replayed, replayed
        device.upload(case.out, np.nan)
        device.upload(case.dinp, np.nan)
        device.upload(case.dinp_added, a["dinp_before"])
        device.upload(case.dweight, a["dweight_before"])
        device.replay(graphs, "matmul", case.launch)
        assert_same_bits(case.results(), expected)


def matmul_gelu(side: Side, a: Arrays, fused: bool, library: bool) -> Arrays:
    """Both directions. Where the GPU does not fuse them, it rounds before the bias, up and dact, and so does
    the baseline.

    The library's GELU is an approximation whose errors have a sign, so that they add up in dbias, which is
    left out then: it is held against the sums of dup itself.
    """
    inp, weight, bias, dout, down = (
        side.stored(a[name]) for name in ("inp", "weight", "bias", "dout", "down")
    )
    act, up, dup = (side.stored(a["empty"]) for _ in range(3))
    dweight, dbias = side.single(a["dweight"]), side.single(a["dbias"])
    if fused or isinstance(side, Gpu):
        side(matmul_gelu_forward, act, up, inp, weight, bias)
        side(matmul_gelu_backward, dup, dweight, dout, act, up, down, dbias)
    else:
        side(cpu_matmul.matmul_forward, up, inp, weight)
        side(bias_forward, up, up, bias)
        side(gelu_forward, act, up)
        side(cpu_matmul.matmul_backward, dup, dweight, dout, act, down)
        side(gelu_backward, dup, dup, up)
        side(bias_backward, dbias, dup)
    return {"act": act, "up": up, "dup": dup, "dweight": dweight} | ({} if library else {"dbias": dbias})


# GELU in another form, of the wrong array or in the wrong direction; a fallback that differs from it. On
# Hopper, of shapes whose widths 64 divides: a tile that is stored beyond the end, a warpgroup out of turn
# (more tiles than the GPU has processors; fewer steps than stages, as many, and more), columns summed into
# others.
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["custom", "cublaslt"])
@pytest.mark.parametrize("storage", STORAGES, ids=("fp32", "bf16"))
@pytest.mark.parametrize(
    "shape",
    [
        (136, 264, 40),
        (130, 33, 130),
        (300, 768, 200),
        (5, 64, 64),
        (300, 192, 320),
        (1100, 3072, 768),
        (9000, 320, 64),
    ],
)
def test_gelu(
    shape: tuple[int, int, int],
    storage: np.dtype[Any],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    rows, hidden, width = shape
    monkeypatch.setattr(cublaslt, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(calibrated_gpu(), "matmul", backend, raising=False)
    monkeypatch.setattr(calibrated_gpu(), "precision", "bf16" if storage == BF16 else "fp32", raising=False)
    cublaslt._PLANS.clear()
    rng = np.random.default_rng(shape)
    sizes = {
        "inp": (rows, width),
        "weight": (hidden, width),
        "bias": (hidden,),
        "dout": (rows, width),
        "down": (width, hidden),
    }
    arrays = {name: rng.standard_normal(size) for name, size in sizes.items()}
    arrays["weight"] *= 2 / np.sqrt(width)  # so that up is neither near 0 nor so large that GELU is straight
    arrays |= {"dweight": rng.standard_normal((width, hidden)), "empty": np.full((rows, hidden), np.nan)}
    arrays["dbias"] = rng.standard_normal(hidden)
    whole = hidden % 64 == width % 64 == 0 and calibrated_gpu().arch == "sm_90"
    library = storage == BF16 and not whole and backend == "cublaslt" and hidden % 8 == 0
    run = partial(matmul_gelu, fused=library or (whole and storage == BF16), library=library)
    scale = {"dup": 4 * np.sqrt(width), "dbias": 4 * np.sqrt(width * rows)}
    assert_calibrated_op(run, arrays, storage, sums=("dweight", "dbias"), scale=scale)
    if library:
        side = Gpu(storage)
        got = on_host(side, matmul_gelu(side, arrays, fused=True, library=False))
        terms = np.concatenate((arrays["dbias"][None], got["dup"].astype(np.float64)))
        bound = (rows + 1) * 2.0**-24 * float(np.abs(terms).sum(0).max())  # a rounding a term
        assert_within("dbias", got["dbias"], terms.sum(0), bound)
    cublaslt._PLANS.clear()


# Another process that makes another choice computes other bits.
@pytest.mark.gpu
def test_choice_is_kept(gpu: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu.matmul = "cublaslt"
    monkeypatch.setattr(cublaslt, "user_cache", lambda: tmp_path)
    cublaslt._PLANS.clear()
    a = inputs((256, 384, 512), "bf16")
    first = run(gpu, a, "bf16")
    chosen = {str(product): plan.chosen for product, plan in cublaslt._PLANS.items()}
    recorded = json.loads((tmp_path / "cuda" / cublaslt.CHOICES).read_text(encoding="utf-8"))
    assert {key.split("; ")[-1]: choice["candidate"] for key, choice in recorded.items()} == chosen
    cublaslt._PLANS.clear()
    monkeypatch.setattr(cublaslt, "milliseconds", None)  # not timed again
    assert_same_bits(run(gpu, a, "bf16"), first)
    cublaslt._PLANS.clear()


# A missing library must say what to install.
def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise RuntimeError(f"no {name}")

    monkeypatch.setattr(cublaslt, "load_nvidia_dynamic_lib", missing)
    with pytest.raises(ValueError, match=r"pip install nvidia-cublas"):
        cublaslt._library.__wrapped__()
