"""Every launcher against the signatures of its kernels, without a GPU.

The launchers run on a device that launches nothing. launch.py checks the names, types and contiguity of what
they pass, and that the instance is one of those that are compiled. Afterwards each of those must have been
launched.
"""

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("cupy")

from kernels.config import ModelConfig
from kernels.cpu import CpuOps
from kernels.cuda import CudaOps
from kernels.cuda.matmul import fp8
from kernels.cuda.runtime.compile import FOLDER
from kernels.cuda.runtime.launch import BF16, E4M3, FLOAT, TENSOR_MAP, Kernel, Template, arguments, constants
from kernels.ops import Ops
from kernels.parameters import flat_size, named, parameter_table

ATTENTIONS, MATMUL = ("hopper", "mma", "scalar"), "custom"  # cuBLASLt has no kernels here
PRECISIONS = ("fp32", "tf32", "bf16")

Calls = Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]


class Memory:
    """What CuPy's arrays have as `data`."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class HostArray(np.ndarray[Any, Any]):
    """A NumPy array in place of CuPy's."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        """Where it lies, as if every array began at a multiple of 256 bytes."""
        return Memory(self.ctypes.data)


def array(shape: tuple[int, ...], dtype: Any) -> HostArray:
    """Zeros that begin at a multiple of 256 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 256, np.uint8)
    begin = -memory.ctypes.data % 256
    return memory[begin : begin + size].view(dtype).reshape(shape).view(HostArray)


class RecordingDevice:
    """kernels.cuda.runtime.device.Device as far as launchers use it."""

    sm_count, shared_bytes, arch, matmul, deterministic, stream = (
        132,
        227 * 1024,
        "sm_90",
        MATMUL,
        True,
        None,
    )

    def __init__(self, precision: str, attention: str) -> None:
        self.precision, self.attention = precision, attention
        self.storage = BF16 if precision == "bf16" else FLOAT
        self.launched: set[tuple[Kernel, Template]] = set()
        self.block_counters = np.zeros(4 * self.sm_count, np.int32)

    def launch(
        self,
        kernel: Kernel,
        template: Template,
        grid: Any,
        block: Any,
        *,
        shared_bytes: int = 0,
        **given: Any,
    ) -> None:
        """Check what Device.launch is given."""
        arguments(kernel, template, given)
        for extent in (*np.atleast_1d(grid), *np.atleast_1d(block)):
            assert extent >= 1, f"{kernel.name}: grid {grid}, block {block}"
        assert 1 <= np.prod(block) <= 1024, f"{kernel.name}: block {block}"
        assert shared_bytes <= self.shared_bytes, f"{kernel.name}: {shared_bytes} bytes of shared memory"
        self.launched.add((kernel, template))

    def workspace(self, *parts: tuple[tuple[int, ...], Any]) -> list[HostArray]:
        """Arrays of these shapes and dtypes."""
        return [array(shape, dtype) for shape, dtype in parts]

    def persistent_buffer(self, name: str, size: int) -> HostArray:
        """As Device's."""
        return array((size,), np.uint8)

    def heads_map(self, target: HostArray) -> Any:
        """As Device's, of nothing."""
        assert target.ndim == 4 and target.dtype == BF16 and target.flags.c_contiguous
        return np.zeros(1, TENSOR_MAP)

    def fill_zero(self, target: HostArray) -> None:
        """As Device's."""
        assert target.flags.c_contiguous


class Sizes(NamedTuple):
    """Extents of a case; dim and ffn are widths of activations, `run` that of a run of parameters."""

    batch: int
    length: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    padded_vocab: int
    run: int


# Rows that 16 bytes divide, of every length that a warp or a block takes in another way, and rows that they
# don't; head widths from each side of the kernels' own.
SIZES = (
    Sizes(2, 5, 63, 3, 1, 10, 61, 61, 1),
    Sizes(2, 5, 256, 2, 1, 16, 509, 512, 64),
    Sizes(1, 7, 512, 4, 2, 32, 509, 512, 64),
    Sizes(1, 9, 768, 4, 4, 64, 509, 512, 64),
    Sizes(1, 9, 1024, 4, 2, 96, 509, 576, 64),
    Sizes(1, 1, 2048, 1, 1, 128, 4096, 4096, 64),
    Sizes(3, 4, 2050, 2, 2, 50, 7, 7, 6),
    Sizes(1, 4, 63, 1, 1, 66, 7, 7, 1),
    Sizes(1, 3, 128, 2, 2, 80, 2, 128, 64),
)


class Maker:
    """Arrays of one storage type."""

    def __init__(self, storage: np.dtype[Any]) -> None:
        self.storage = storage

    def stored(self, *shape: int) -> HostArray:
        """Of the storage type."""
        return array(shape, self.storage)

    def single(self, *shape: int) -> HostArray:
        """fp32."""
        return array(shape, FLOAT)

    def ids(self, *shape: int) -> HostArray:
        """int32."""
        return array(shape, np.int32)


def row_calls(m: Maker, s: Sizes) -> Calls:
    """Operations over rows of activations."""
    rows, dim, t, f = s.batch * s.length, s.dim, m.stored, m.single
    x, stream, statistic, vector = (
        (lambda: t(rows, dim)),
        (lambda: f(rows, dim)),
        (lambda: f(rows)),
        (lambda: f(dim)),
    )
    yield "rmsnorm_forward", (x(), statistic(), stream(), vector()), {"eps": 1e-5}
    yield "rmsnorm_backward", (x(), vector(), x(), stream(), vector(), statistic()), {}
    two, parameters = (statistic(), statistic()), (vector(), vector())
    yield "layernorm_forward", (x(), *two, stream(), *parameters), {"eps": 1e-5}
    yield "layernorm_backward", (x(), *parameters, x(), stream(), vector(), *two), {}
    for branch_bias, dresidual in ((None, x()), (vector(), x()), (vector(), None)):
        yield (
            "residual_rmsnorm_forward",
            (stream(), x(), statistic(), stream(), x(), branch_bias, vector()),
            {"eps": 1e-5},
        )
        yield (
            "residual_rmsnorm_backward",
            (x(), vector(), branch_bias, dresidual, x(), stream(), vector(), statistic()),
            {},
        )
        yield (
            "residual_layernorm_forward",
            (stream(), x(), *two, stream(), x(), branch_bias, *parameters),
            {"eps": 1e-5},
        )
        yield (
            "residual_layernorm_backward",
            (x(), *parameters, branch_bias, dresidual, x(), stream(), vector(), *two),
            {},
        )
    yield "bias_forward", (x(), x(), t(dim)), {}
    yield "bias_backward", (vector(), x()), {}
    yield "gelu_forward", (x(), x()), {}
    yield "gelu_backward", (x(), x(), x()), {}
    yield "swiglu_forward", (x(), t(rows, 2 * dim)), {}
    yield "swiglu_backward", (t(rows, 2 * dim), x(), t(rows, 2 * dim)), {}


def product_calls(m: Maker, s: Sizes) -> Calls:
    """Embedding and products."""
    rows, dim, t, f, ids = s.batch * s.length, s.dim, m.stored, m.single, m.ids(s.batch, s.length)
    for position, dposition in ((None, None), (f(s.length, dim), f(s.length, dim))):
        yield "embedding_forward", (f(rows, dim), ids, ids, f(s.padded_vocab, dim), position), {}
        yield "embedding_backward", (f(s.padded_vocab, dim), dposition, t(rows, dim), ids, ids), {}
    inp, weight, out = t(rows, dim), t(s.padded_vocab, dim), t(rows, s.padded_vocab)
    yield "matmul_forward", (out, inp, weight), {}
    up, wide = t(rows, s.padded_vocab), t(s.padded_vocab, dim)
    yield "matmul_gelu_forward", (out, up, inp, wide, t(s.padded_vocab)), {}
    for dbias in (None, f(s.padded_vocab)):
        yield (
            "matmul_gelu_backward",
            (out, f(dim, s.padded_vocab), inp, out, up, t(dim, s.padded_vocab), dbias),
            {},
        )
    for few in range(1, 5):
        yield "matmul_forward", (t(few, s.padded_vocab), t(few, dim), weight, t(s.padded_vocab)), {}
    for add in (False, True):
        yield (
            "matmul_backward",
            (inp, f(s.padded_vocab, dim), out, inp, weight),
            {"add_dinp": add, "add_dweight": not add},
        )


def attention_calls(m: Maker, s: Sizes) -> Calls:
    """Operations over heads."""
    t, f, (batch, length, head_dim) = m.stored, m.single, (s.batch, s.length, s.head_dim)
    ids, all_heads = m.ids(batch, length), s.heads + 2 * s.kv_heads
    qkv, out, lse = (
        t(batch, length, all_heads, head_dim),
        t(batch, length, s.heads, head_dim),
        f(batch, s.heads, length),
    )
    table, rotated = f(length, 2, head_dim // 2), s.heads + s.kv_heads
    yield "rope_forward", (qkv, ids, table), {"rotated": rotated}
    yield "rope_backward", (qkv, ids, table), {"rotated": rotated}
    rstd = f(batch * length, rotated)
    for weight, angles in ((f(head_dim), table), (None, table), (f(head_dim), None)):
        sizes = {"kv_heads": s.kv_heads}
        inputs = (ids, angles, weight, weight)
        yield "qk_norm_forward", (qkv, rstd, *inputs), sizes | {"eps": 1e-5}
        yield "qk_norm_backward", (qkv, weight, weight, qkv, rstd, *inputs), sizes
    yield "attention_forward", (out, lse, qkv, ids), {}
    for dbias in (None, f(all_heads * head_dim)):
        yield "attention_backward", (qkv, out, out, lse, qkv, ids, dbias), {}
    cache = (t(batch, 2 * length, s.kv_heads, head_dim) for _ in range(2))
    yield "decode_attention_forward", (out, qkv, *cache, m.ids()), {}


def step_calls(m: Maker, s: Sizes) -> Calls:
    """A pass of the model in one kernel, of each number of rows, where it is taken."""
    if m.storage != BF16 or s.dim % 8 or s.head_dim % 8:
        return
    sizes: dict[str, Any] = {
        "vocab_size": s.vocab_size,
        "layers": 2,
        "heads": s.heads,
        "kv_heads": s.kv_heads,
        "ffn": s.dim,
    }
    gpt2: dict[str, Any] = {
        "norm": "layernorm",
        "position": "learned",
        "mlp": "gelu",
        "bias": True,
        "tied_head": True,
    }
    qk_norm: list[dict[str, Any]] = [{"qk_norm": "weighted"}] if s.head_dim in (16, 32, 64, 128, 256) else []
    for parts in ({}, *qk_norm, gpt2):
        c = ModelConfig(**sizes, context=8, dim=s.heads * s.head_dim, **parts)
        names = parameter_table(c)
        weights, parameters = (
            named(m.stored(flat_size(names)), names),
            named(m.single(flat_size(names)), names),
        )
        table = None if parts is gpt2 else m.single(c.context, 2, c.head_dim // 2)
        head = weights["tok.weight"] if c.tied_head else weights["head.weight"][0]
        for batch, count in ((1, 1), (2, 1), (1, 3), (2, 2)):
            outs = m.stored(batch * count, c.padded_vocab), m.stored(batch * count, c.dim)
            cache = (m.stored(c.layers, batch, c.context, c.kv_heads, c.head_dim) for _ in range(2))
            ids = m.ids(batch, count), m.ids(batch, count), m.ids()
            yield "decode_step", (*outs, *ids, *cache, weights, parameters, head, table), {"config": c}


def update_calls(m: Maker, s: Sizes) -> Calls:
    """Loss, update and draw."""
    rows, size, f, vocab = s.batch * s.length, 6 * s.run, m.single, {"vocab_size": s.vocab_size}
    logits, targets, double = m.stored(rows, s.padded_vocab), m.ids(rows), array((), np.float64)
    for softcap in (0.0, 15.0):
        options: dict[str, Any] = vocab | {"softcap": softcap}
        yield "cross_entropy_forward", (f(rows), array((rows,), np.bool_), logits, targets), options
        yield "cross_entropy_backward", (logits, f(rows), targets, f(rows)), options
    yield "weighted_sum_forward", (double, f(rows), f(rows)), {}
    yield "square_sums", (f(1), f(size)), {}
    yield "grad_norm", (double, f(3)), {}
    constants: dict[str, Any] = {
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "grad_clip": 1.0,
    }
    constants["lr_scales"] = (1.0, 1.0, 1.0, 1.0)
    flat = (f(size), f(size), f(size), f(size))
    for copy in (None, m.stored(size)):
        scalars = (array((6,), np.uint8), double, double, array((), np.int64))
        yield "adamw", (*flat, copy, *scalars), constants
    yield from muon_calls(m, 2, s.head_dim)
    for count in (rows * s.dim, 7):
        yield "cast", (array((count,), BF16), f(count)), {}
    inp, scale, transposed = array((rows, 48), BF16), f(), array((48, -(-rows // 16) * 16), E4M3)
    given = array(inp.shape, E4M3), transposed, scale, array((), np.int32)
    yield "fp8", (*given[:3], None, inp), {"measure": True}
    yield "fp8", (*given, inp), {"measure": False}
    yield "fp8_gelu_forward", (*given, inp), {}
    yield "fp8_gelu_backward", (*given, f(1, -(-rows // 128), 48), inp, inp), {}
    yield "fp8_rescale", (f(4, 3, 4), array((4, 2), np.int32), double), {}
    yield "suppress_tokens", (logits, targets), {}
    for softcap, temperature in ((0.0, 0.0), (0.0, 1.0), (15.0, 1.0)):
        settings = {**vocab, "softcap": softcap, "temperature": temperature, "top_k": 5, "top_p": 0.9}
        yield "sample", (targets, logits, array((rows,), np.float64)), settings


def muon_calls(m: Maker, layers: int, side: int) -> Calls:
    """Of three matrices a layer, wide and tall."""
    double, settings = array((), np.float64), {"weight_decay": 0.1, "grad_clip": 1.0}
    for shape in ((side, 2 * side), (2 * side, side)):
        for copied in (False, True):
            flat = [make(layers, 3, *shape) for make in (m.single, m.single, m.single, m.stored)]
            scratch = (
                m.stored(3 * layers, *extents) for extents in (shape, shape, (side, side), (side, side))
            )
            yield "muon", (*flat[:3], flat[3] if copied else None, *scratch, double, double), settings


def calls(storage: np.dtype[Any], sizes: Sizes) -> Calls:
    """One call, or more, of each launcher."""
    for make in (row_calls, product_calls, attention_calls, step_calls, update_calls):
        yield from make(Maker(storage), sizes)


def launcher(name: str) -> Any:
    """An operation of CudaOps, or a cast of matmul_fp8's, as a function of a device."""
    return getattr(CudaOps, name, None) or getattr(fp8, name)


@cache
def launched_by(precision: str, attention: str, sizes: Sizes) -> frozenset[tuple[Kernel, Template]]:
    """What all launchers launch; an argument that a kernel does not take is an AssertionError here."""
    device = RecordingDevice(precision, attention)
    for name, given, options in calls(device.storage, sizes):
        launcher(name)(device, *given, **options)
    return frozenset(device.launched)


# An argument of another type, missing, or in a strided view: on the GPU it is wrong numbers or an illegal
# address.
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_launches_are_what_kernels_take(sizes: Sizes, precision: str, attention: str) -> None:
    assert launched_by(precision, attention, sizes)


# Launches that grow with the layers: by the thousand, of a few microseconds each, they took longer than what
# they do.
@pytest.mark.parametrize("layers", [1, 5])
def test_muons_launches_are_as_many_whatever_the_layers(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.cuda.matmul import cublaslt

    device, started = RecordingDevice("bf16", "mma"), list[str]()
    monkeypatch.setattr(device, "matmul", "cublaslt", raising=False)
    monkeypatch.setattr(device, "launch", lambda kernel, *_, **__: started.append(kernel.name))
    monkeypatch.setattr(cublaslt, "multiply", lambda *_, **__: started.append("matmul"))
    for _, given, options in muon_calls(Maker(BF16), layers, 16):
        started.clear()
        launcher("muon")(device, *given, **options)
        assert len(started) == 23


# Full fp32 rounded to tf32 by attention, or tf32 that plain cores compute.
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_fp32_arrays_are_rounded_where_asked_for(attention: str) -> None:
    from kernels.cuda.attention.attention import attention_kernel

    for head_dim in (32, 64, 80, 96, 128):
        devices: dict[str, Any] = {
            precision: RecordingDevice(precision, attention) for precision in PRECISIONS
        }
        assert attention_kernel(devices["fp32"], FLOAT, head_dim) == "scalar"
        expected = "scalar" if attention == "scalar" or head_dim == 80 else "mma"
        assert attention_kernel(devices["tf32"], FLOAT, head_dim) == expected


# A struct's bytes go to the kernel as they are: nothing there would notice an array, or half a map.
def test_only_tensor_maps_pass_as_such() -> None:
    from kernels.cuda.attention.attention import _HOPPER_FORWARD as kernel

    template = kernel.instances[0]
    given: dict[str, Any] = {p.name: None if p.pointer else 1 for p in kernel.parameters(template)}
    given |= {"out_map": np.zeros(1, TENSOR_MAP), "qkv_map": np.zeros(1, TENSOR_MAP)}
    assert len(arguments(kernel, template, given)) == len(given)
    for wrong in (np.zeros(2, TENSOR_MAP), np.zeros(16, np.uint64)):
        with pytest.raises(AssertionError, match="out_map is not a tensor map"):
            arguments(kernel, template, {**given, "out_map": wrong})


# An operation that is checked neither here nor by the test of its name on a GPU.
def test_every_operation_is_called() -> None:
    operations = {
        name: value.__func__
        for name, value in vars(CpuOps).items()
        if isinstance(value, staticmethod) and name in vars(Ops)  # others are the CPU's alone
    }
    called = {name for name, _, _ in calls(BF16, SIZES[1])}
    of_gpu = {"decode_step", "cast", "fp8", "fp8_rescale", "fp8_gelu_forward", "fp8_gelu_backward"}
    for name in operations.keys() - called:
        stem = operations[name].__module__.rpartition(".")[2]
        test = Path(__file__).with_name(f"test_{stem}.py").read_text(encoding="utf-8")
        assert "assert_calibrated_op(" in test, name
    assert called <= operations.keys() | of_gpu


# An instance that nothing launches is compiled and tested for nothing, or a launcher does not choose what it
# was meant to.
def test_every_instance_is_launched() -> None:
    launched = {one for p in PRECISIONS for a in ATTENTIONS for s in SIZES for one in launched_by(p, a, s)}
    launchers = {launcher(name).__module__ for name, _, _ in calls(BF16, SIZES[1])}
    modules = map(import_module, launchers | {"kernels.cuda.sum_rows"})
    for module in modules:
        for kernel in (value for value in vars(module).values() if isinstance(value, Kernel)):
            closed = () if kernel.open else kernel.instances
            dead = [kernel.expression(template) for template in closed if (kernel, template) not in launched]
            assert not dead, f"{module.__name__}: never launched: {dead}"


# A launcher that works with another number than the kernel: one that it computes from is misread, or not
# found.
def test_constants_of_a_source(tmp_path: Path) -> None:
    (tmp_path / "inner.cuh").write_text("#pragma once\nconstexpr int A = 3;\n")
    (tmp_path / "outer.cu").write_text(
        '#include "inner.cuh"\n'
        "constexpr int B = 2 * (A + 1), C = B / 3 - 1;  // constexpr int D = 4;\n"
        "constexpr int larger(int a, int b) { return a > b ? a : b; }\n"
        "constexpr int E = larger(A, B);\n"
        "void f() {\n    constexpr int A = 5;\n}\n"
    )
    assert constants(str(tmp_path / "outer.cu")) == {"A": 3, "B": 8, "C": 1}


# A constant that a launcher repeats and a kernel has changed: memory of another size than the kernel writes.
def test_launchers_repeat_the_kernels_constants() -> None:
    fp8, text8 = (
        import_module("kernels.cuda.matmul.fp8"),
        (FOLDER / "matmul/fp8.cu").read_text(encoding="utf-8"),
    )
    block, columns = (int(re.search(rf"\b{name} = (\d+)", text8)[1]) for name in ("CAST_BLOCK", "COLUMNS"))  # type: ignore[index]
    for name in ("SIZE", "SCALE_BLOCK", "CAST_BLOCK", "LOADS_IN_FLIGHT", "COLUMNS"):
        assert re.search(rf"\b{name} = {getattr(fp8, f'_{name}')}[,;]", text8), name
    assert "ROWS_PER_THREAD = 4;" in text8
    assert "ROWS = CAST_BLOCK / (COLUMNS / SIZE) * ROWS_PER_THREAD;" in text8
    assert block // (columns // fp8._SIZE) * 4 == fp8.ROWS
    muon, launcher = (FOLDER / "muon.cu").read_text(encoding="utf-8"), import_module("kernels.cuda.muon")
    assert f"constexpr int BLOCK = {launcher._BLOCK}, CHUNK = {launcher._CHUNK};" in muon
