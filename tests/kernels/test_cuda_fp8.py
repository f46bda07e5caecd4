"""Casts to 8 bits and the products of them on the GPU: casts bit for bit, products against float64 of the
casts' numbers.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.config import ModelConfig, Numerics
from kernels.cpu import fp8 as cpu
from tests.compare import UNIT, Array, Arrays, assert_same_bits, assert_within, from_fp8
from tests.cuda import BF16, FLOAT, gpu, on_gpu, rounded
from tests.gradient_check import MODELS

pytest.importorskip("cupy")

from kernels.cuda import FP8_ARCH, CudaOps
from kernels.cuda.matmul import cublaslt
from kernels.cuda.matmul.fp8 import fp8, fp8_rescale
from kernels.cuda.matmul.matmul import matmul_backward, matmul_forward
from kernels.cuda.matmul.matmul_fp8 import (
    Fp8Weight,
    cast_weight,
    fp8_mlp_backward,
    fp8_mlp_forward,
    fp8_weight,
)
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import E4M3

# A Hopper tensor core adds so many products and the sum so far at once, cut off so many bits below the
# largest of them; without fast sums so many products are added to a sum in fp32.
CORE_TERMS, CORE_BITS, FP32_TERMS = 32, 13, 128


def fp8_gpu() -> Device:
    """The GPU; the test is skipped where it has no FP8."""
    if int(gpu().arch[3:]) < FP8_ARCH:
        pytest.skip(f"{gpu().arch} has no FP8 products")
    return gpu()


def memory(device: Device, shape: tuple[int, ...]) -> Any:
    """A device array of NaN."""
    return on_gpu(device, np.full(shape, 0x7F, E4M3), E4M3)


def matrix(rows: int, columns: int) -> Array:
    """Numbers of many magnitudes that bf16 holds, the largest where a block may miss it."""
    rng = np.random.default_rng([rows, columns])
    values = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-20, 3, (rows, columns))
    values[rng.random(values.shape) < 0.1] = 0
    values[-1, -1] = -100
    return rounded(values, BF16)


# A row or a column of another tile, an edge not reached or passed, the wrong half of a word, another
# rounding, a maximum that misses an element or keeps the one before.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "columns", "more"),
    [(1, 16, 0), (7, 48, 0), (16, 64, 16), (127, 80, 0), (129, 208, 64), (5000, 1040, 0)],
)
def test_cast(rows: int, columns: int, more: int) -> None:
    device, inp, pitch = gpu(), matrix(rows, columns), -(-rows // 16) * 16 + more
    source = on_gpu(device, inp, BF16)
    out, transposed, scale = (
        np.empty(inp.shape, E4M3),
        np.empty((columns, pitch), E4M3),
        np.zeros((), np.float32),
    )
    for factor in (None, 1.0, 0.01, 1e6):  # measured; used as it is; beyond the largest; most too small
        amax = np.array(
            7 if factor is None else 2**30, np.int32
        )  # what is there: less than the largest; more
        if factor is not None:
            scale[...] *= factor
        noted = on_gpu(device, amax, np.int32)
        cpu.fp8(out, transposed, scale, amax, inp, measure=factor is None)
        to = {"out": memory(device, inp.shape), "transposed": memory(device, (columns, pitch))}
        of_gpu = on_gpu(device, np.array(np.nan if factor is None else scale, np.float32), FLOAT)
        fp8(device, to["out"], to["transposed"], of_gpu, noted, source, measure=factor is None)
        got = {name: device.download(array) for name, array in {**to, "scale": of_gpu, "amax": noted}.items()}
        assert_same_bits(got, {"out": out, "transposed": transposed, "scale": scale, "amax": amax})
    assert not device.download(device.block_counters).any()


# Infinity or NaN in a corner that the maximum passes over: training would go on with wrong numbers.
@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite(wrong: float) -> None:
    device, inp = gpu(), matrix(33, 48)
    inp[20, 30] = wrong
    to = memory(device, inp.shape), memory(device, (48, 48))
    scale = on_gpu(device, np.zeros((), np.float32), FLOAT)
    source, amax = on_gpu(device, inp, BF16), on_gpu(device, np.zeros((), np.int32), np.int32)
    fp8(device, *to, scale, None, source, measure=True)
    with np.errstate(invalid="ignore"):
        assert np.isnan(from_fp8(device.download(to[0])) * device.download(scale)).all()
    device.upload(scale, 1.0)
    fp8(device, *to, scale, amax, source, measure=False)
    assert np.argwhere(np.isnan(from_fp8(device.download(to[0])))).tolist() == [[20, 30]]
    assert not np.isfinite(device.download(amax).view(np.float32))


# Scales of another product or factor, a magnitude that stays; and one that goes though the update is not
# applied.
@pytest.mark.gpu
def test_rescale() -> None:
    device, rng = gpu(), np.random.default_rng(0)
    scales, magnitudes = (
        rng.random((150, 3, 4), np.float32),
        rng.random((150, 2), np.float32) * np.float32(1e-3),
    )
    magnitudes[7, 0] = 0
    amax = magnitudes.view(np.int32)
    of_gpu, noted = on_gpu(device, scales, FLOAT), on_gpu(device, amax, np.int32)
    for norm in (np.array(np.nan), np.array(2.0)):
        fp8_rescale(device, of_gpu, noted, on_gpu(device, norm, np.float64))
        cpu.fp8_rescale(scales, amax, norm)
        assert_same_bits(
            {"scales": device.download(of_gpu), "amax": device.download(noted)},
            {"scales": scales, "amax": amax},
        )


def cast(values: Array) -> tuple[Array, float]:
    """The numbers of the cast, and its scale."""
    out, transposed, scale = (
        np.empty(values.shape, E4M3),
        np.empty(values.shape[::-1], E4M3),
        np.zeros((), np.float32),
    )
    cpu.fp8(out, transposed, scale, None, values, measure=True)
    return from_fp8(out), float(scale)


def summed(a: Array, b: Array, fast: bool) -> Array:
    """a @ b^T as tensor cores sum it."""
    total = np.zeros((len(a), len(b)))
    inner = np.zeros_like(total)
    for k in range(0, a.shape[1], CORE_TERMS):
        terms = np.concatenate(
            (a[:, None, k : k + CORE_TERMS] * b[None, :, k : k + CORE_TERMS], inner[..., None]), axis=2
        )
        unit = 2.0 ** (np.frexp(np.abs(terms).max(axis=2, keepdims=True))[1] - 1 - CORE_BITS)
        inner = (np.trunc(terms / unit) * unit).sum(axis=2)
        if not fast and (k + CORE_TERMS) % FP32_TERMS == 0:
            total = (total + inner).astype(np.float32).astype(np.float64)
            inner[...] = 0
    return total + inner


def arrays_of(rows: int, outputs: int, inputs: int) -> Arrays:
    """Numbers that bf16 holds; gradients are small, as they are in training."""
    rng = np.random.default_rng([rows, outputs, inputs])
    sizes = {"inp": (rows, inputs), "weight": (outputs, inputs), "dout": (rows, outputs), "bias": (outputs,)}
    arrays = {name: rounded(rng.standard_normal(size), BF16) for name, size in sizes.items()}
    arrays["dout"] = rounded(arrays["dout"] * 1e-5, BF16)
    return {**arrays, "before": 1e-4 * rng.standard_normal((outputs, inputs), np.float32)}


def handle(device: Device, weight: Array) -> Fp8Weight:
    """A weight with its casts."""
    casts = memory(device, weight.shape), memory(device, weight.shape[::-1])
    saved = memory(device, (weight.shape[1] * 512,))
    numbers = {
        "scales": on_gpu(device, np.full((3, 4), np.nan), FLOAT),
        "amax": on_gpu(device, np.zeros(2, np.int32), np.int32),
    }
    found = fp8_weight(device, on_gpu(device, weight, BF16), *casts, saved, **numbers)
    cast_weight(device, found)
    return found


def products(device: Device, a: Arrays) -> Arrays:
    """All of them by the operations that the model calls."""
    weight, inp, dout = (
        handle(device, a["weight"]),
        on_gpu(device, a["inp"], BF16),
        on_gpu(device, a["dout"], BF16),
    )
    arrays = {name: on_gpu(device, a["dout"] * np.nan, BF16) for name in ("out", "biased")}
    arrays |= {name: on_gpu(device, a["inp"] * np.nan, BF16) for name in ("dinp", "again")}
    arrays |= {
        "dweight": on_gpu(device, a["before"], FLOAT),
        "alone": on_gpu(device, a["before"] * np.nan, FLOAT),
    }
    matmul_forward(device, arrays["out"], inp, weight)
    matmul_forward(device, arrays["biased"], inp, weight, on_gpu(device, a["bias"], BF16))
    matmul_backward(device, arrays["dinp"], arrays["dweight"], dout, inp, weight)
    matmul_backward(device, arrays["again"], arrays["alone"], dout, inp, weight, add_dweight=False)
    return {name: device.download(array) for name, array in arrays.items()}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Device:
    """With no choices of other tests and runs."""
    found = fp8_gpu()
    monkeypatch.setattr(cublaslt, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(cublaslt, "_PLANS", {})
    monkeypatch.setattr(found, "matmul", "cublaslt", raising=False)
    monkeypatch.setattr(found, "current_scaling", True)
    monkeypatch.setattr(found, "precision", "bf16", raising=False)
    return found


# A scale of the other factor or upside down, a factor that is not transposed, padding that is summed, rows
# left out, an accumulation that overwrites. The error allowed is thrice that of sums as the hardware makes
# them.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(16, 16, 16), (7, 48, 32), (130, 64, 208), (257, 272, 128), (160, 80, 512)]
)
def test_products(device: Device, shape: tuple[int, int, int]) -> None:
    a = arrays_of(*shape)
    got = products(device, a)
    assert_same_bits(products(device, a), got)
    (inp, inp_scale), (weight, scale), (dout, dout_scale) = (
        cast(a[name]) for name in ("inp", "weight", "dout")
    )
    for name, left, right, factor, added in (
        ("out", inp, weight, inp_scale * scale, 0),
        ("biased", inp, weight, inp_scale * scale, a["bias"]),
        ("dinp", dout, weight.T, dout_scale * scale, 0),
        ("again", dout, weight.T, dout_scale * scale, 0),
        ("dweight", dout.T, inp.T, dout_scale * inp_scale, a["before"]),
        ("alone", dout.T, inp.T, dout_scale * inp_scale, 0),
    ):
        expected = factor * (left @ right.T) + added
        baseline = factor * summed(left, right, fast=name not in ("dweight", "alone")) + added
        if name in ("out", "biased", "dinp", "again"):
            baseline = rounded(baseline, BF16).astype(np.float64)
        floor = UNIT[FLOAT] * factor * float((np.abs(left) @ np.abs(right.T)).max())
        assert_within(name, got[name], expected, 3 * max(float(np.abs(baseline - expected).max()), floor))


# A GELU of another array, not rounded or in place of its derivative, sums of a tile that is not whole: with
# known scales it is the operations one by one. Only sums of rows have another order.
@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "hidden", "width"), [(130, 192, 64), (7, 16, 32), (300, 272, 48)])
def test_mlp_is_its_parts(device: Device, rows: int, hidden: int, width: int) -> None:
    from kernels.cuda.bias import bias_backward
    from kernels.cuda.gelu import gelu_backward, gelu_forward

    a = arrays_of(rows, hidden, width)
    inp, bias, dout = (on_gpu(device, array, BF16) for array in (a["inp"], a["bias"], a["inp"][::-1] * 1e-5))
    weight, down = handle(device, a["weight"] / 8), handle(device, a["weight"].T.copy())

    def mlp() -> Arrays:
        nan = {name: on_gpu(device, np.full((rows, hidden), np.nan), BF16) for name in ("act", "up", "dup")}
        nan |= {name: on_gpu(device, np.full((rows, width), np.nan), BF16) for name in ("out", "dinp")}
        grads = {name: on_gpu(device, np.ones(size), FLOAT) for name, size in
                 (("dweight", (hidden, width)), ("ddown", (width, hidden)), ("dbias", (hidden,)))}  # fmt: skip
        fp8_mlp_forward(device, nan["out"], nan["act"], nan["up"], inp, weight, bias, down)
        given = (
            nan["dinp"],
            nan["dup"],
            grads["dweight"],
            grads["dbias"],
            grads["ddown"],
            dout,
            nan["up"],
            weight,
            down,
        )
        fp8_mlp_backward(device, *given, add_dweight=True)
        kept = {name: nan[name] for name in ("out", "dinp")} | grads
        return {name: device.download(array) for name, array in kept.items()}

    measured = mlp()
    device.current_scaling = False
    got = mlp()
    up, act, dup = (on_gpu(device, np.full((rows, hidden), np.nan), BF16) for _ in range(3))
    out, dinp = (on_gpu(device, np.full((rows, width), np.nan), BF16) for _ in range(2))
    dweight, ddown, dbias = (
        on_gpu(device, np.ones(size), FLOAT) for size in ((hidden, width), (width, hidden), (hidden,))
    )
    matmul_forward(device, up, inp, weight, bias)
    gelu_forward(device, act, up)
    matmul_forward(device, out, act, down)
    matmul_backward(device, dup, ddown, dout, act, down)
    gelu_backward(device, dup, dup, up)
    bias_backward(device, dbias, dup)
    matmul_backward(device, dinp, dweight, dup, inp, weight)
    parts = {"out": out, "dinp": dinp, "dweight": dweight, "ddown": ddown, "dbias": dbias}
    expected = {name: device.download(array) for name, array in parts.items()}
    terms = np.concatenate((np.ones((1, hidden)), device.download(dup).astype(np.float64)))
    for found in (measured, got):
        assert_within(
            "dbias",
            found.pop("dbias"),
            terms.sum(0),
            (rows + 1) * UNIT[FLOAT] * float(np.abs(terms).sum(0).max()),
        )
    del expected["dbias"]
    assert_same_bits(measured, expected)
    assert_same_bits(got, expected)


# A GPU that has no FP8 products, or a model whose widths they do not take: the library's error in the middle
# of a run.
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(device: Any, index: int) -> None:
        device.arch, device.model, device.sm_count = arch, "Some GPU", 132

    monkeypatch.setattr(Device, "__init__", opened)
    arch = "sm_86"
    CudaOps(Numerics(precision="bf16"))
    with pytest.raises(
        ValueError, match=r"^numerics\.precision: fp8 needs .* sm_89 or later, Some GPU is sm_86; .* bf16$"
    ):
        CudaOps(Numerics(precision="fp8"))
    arch = "sm_90"
    ops = CudaOps(Numerics(precision="fp8"))
    assert (ops.precision, ops.storage) == ("bf16", BF16)
    with pytest.raises(
        ValueError, match=r"^numerics\.precision: fp8 needs .* multiples of 16 .*, one is \d+; "
    ):
        ops.workspace_bytes(MODELS["gpt2"], 99)
    whole = ModelConfig(
        50257, 12, 12, 12, 768, 3072, 1024, norm="layernorm", position="learned", mlp="gelu", bias=True
    )
    plain = CudaOps(Numerics(precision="bf16")).workspace_bytes(whole, 32768)
    assert ops.workspace_bytes(whole, 32768) > max(plain, 32768 * (2 * 3072 + 768))
