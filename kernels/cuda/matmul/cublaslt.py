"""The op matmul's library backend: cuBLASLt through ctypes, each shape by the fastest of its algorithms.

A shape is planned at its first matmul. Its descriptors are made, the candidates of the library's heuristic are timed on
the arrays at hand, and the choice is recorded in the user's cache folder, so that a later process computes the same
bits. After that a matmul is one call on the device's stream, which a graph can capture.

The library is column-major, so it is asked for the transpose, out^T = op(b)^T op(a)^T: its first operand is our second.

Determinism: only algorithms are offered that, if they split k, keep the partial sums in fp32 in the workspace and add
them in a second step. The other two schemes round partial sums to the type of `out`, and one adds them in place.
"""

import ctypes
from ctypes import (
    byref,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from functools import cache, partial
from typing import Any, NamedTuple

import cupy
import numpy as np
from cuda.pathfinder import load_nvidia_dynamic_lib

from kernels.cuda.runtime import choices
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, E4M3, FLOAT
from kernels.cuda.runtime.timing import milliseconds
from kernels.user_cache import user_cache

Scales = tuple[Any, Any]
CHOICES = "cublaslt.json"
WORKSPACE_BYTES = 32 << 20  # what NVIDIA advises for Hopper
INSTALL = "python -m pip install nvidia-cublas, of CUDA 13.0, or set numerics.matmul to custom (and precision fp8 to bf16)"

# cudaDataType, cublasComputeType_t, and the attributes of cublasLt.h that are set here.
_TYPES, _NAMES = {FLOAT: 0, BF16: 14, E4M3: 28}, {FLOAT: "fp32", BF16: "bf16", E4M3: "e4m3"}
_COMPUTE = {"fp32": 68, "bf16": 68, "tf32": 77, "fp8": 68, "fp8 fast": 68}
_BATCH_COUNT, _BATCH_OFFSET = 5, 6
_TRANSPOSE_FIRST, _TRANSPOSE_SECOND, _EPILOGUE, _BIAS, _AUX, _AUX_ROW = 3, 4, 7, 8, 11, 12
_SCALES, _FAST_SUMS = (18, 17), 25  # of our a, the second factor, and of b
_EPILOGUES = {"": 1, "bias": 4, "gelu": 160, "bias gelu": 164, "gelu backward": 192}
_MAX_WORKSPACE, _REDUCTION_SCHEMES, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_REDUCE_IN_COMPUTE_TYPE = 2
_CANDIDATES = 8
_BYTES = (16, 8, 4, 2)  # alignments of an address that are told apart
# The first candidate within the margin of the fastest is taken, so that a near tie is not decided by noise.
_MARGIN = 1.01


class _Candidate(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace_bytes", c_size_t), ("status", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


class Product(NamedTuple):
    """out (m, n) = op(a) (m, k) @ op(b) (k, n), op a transposition or none; `accumulate` adds to out. Arrays are row-major.

    Args:
        inputs, output: element types.
        precision: what the factors are rounded to: "fp32", "tf32", "bf16", "fp8", or "fp8 fast", sums then in fewer bits as well.
        alignments: of the addresses of a, b and out, in bytes; of every matrix of a batch.
        epilogue: what is done to each sum before it is rounded, "" for nothing: "bias", a row (n,) is added; "gelu", it is kept
            in `aux` (m, n) and becomes its GELU; "bias gelu", both; "gelu backward", it is multiplied by GELU's derivative at
            aux. Bias and aux are of the output's type.
        batch: that many such products, without an epilogue, where the arrays are (batch, ..).
    """

    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    accumulate: bool
    inputs: np.dtype[Any]
    output: np.dtype[Any]
    precision: str
    alignments: tuple[int, int, int]
    epilogue: str = ""
    batch: int = 1

    def __str__(self) -> str:
        operation = f"{'T' if self.transpose_a else 'N'}{'T' if self.transpose_b else 'N'}{'+' if self.accumulate else ''}"
        alignments = ",".join(map(str, self.alignments))
        types = f"{_NAMES[self.inputs]}-{_NAMES[self.output]} {self.precision}{self.epilogue and ' '}{self.epilogue}"
        batch = f"{self.batch} of " if self.batch > 1 else ""
        return f"{batch}{self.m}x{self.n}x{self.k} {operation} {types} {alignments}"


def multiply(
    device: Device, out: Any, a: Any, b: Any, *, precision: str, transpose_a: bool = False, transpose_b: bool = False,
    accumulate: bool = False, epilogue: str = "", bias: Any = None, aux: Any = None, scales: Scales = (None, None),
) -> None:  # fmt: skip
    """out (+)= op(a) @ op(b) with Product's epilogue; out is neither a nor b. The first call for a shape times candidates.

    Args:
        device: where.
        out, a, b: row-major arrays.
        precision, transpose_a, transpose_b, accumulate, epilogue, bias, aux: see Product.
        scales: () fp32 at multiples of 16 bytes, which a and b are multiplied by. FP8 requires them, a transposed b, and n
            and k that are multiples of 16.

    Raises:
        ValueError: the library is missing, or has no algorithm for the matmul.
    """
    product = product_of(
        out, a, b, precision=precision, transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate,
        epilogue=epilogue,
    )  # fmt: skip
    found = plan(device, product, out, a, b, bias=bias, aux=aux, scales=scales)
    found.run(device, out, a, b, bias=bias, aux=aux, scales=scales)


def product_of(
    out: Any, a: Any, b: Any, *, precision: str, transpose_a: bool = False, transpose_b: bool = False,
    accumulate: bool = False, epilogue: str = "",
) -> Product:  # fmt: skip
    """The matmul that `multiply` computes for these arguments."""
    *batch, m, n = out.shape
    k = a.shape[-2 if transpose_a else -1]
    product = Product(
        m, n, k, transpose_a, transpose_b, accumulate, a.dtype, out.dtype, precision,
        (_alignment(a), _alignment(b), _alignment(out)), epilogue, *batch,
    )  # fmt: skip
    assert a.shape == (*batch, *((k, m) if transpose_a else (m, k))), product
    assert b.shape == (*batch, *((n, k) if transpose_b else (k, n))), product
    assert a.dtype == b.dtype and all(x.flags.c_contiguous for x in (out, a, b)), product
    return product


def plan(
    device: Device, product: Product, out: Any, a: Any, b: Any, *, bias: Any = None, aux: Any = None,
    scales: Scales = (None, None),
) -> "Plan":  # fmt: skip
    """The plan of a matmul, made at the first call for its shape; timing may leave the result in `out`."""
    found = _PLANS.get(product)
    if found is None:
        assert not device.stream.is_capturing(), (
            f"cuBLASLt: {product} has to run once before a graph captures it"
        )
        found = Plan(product, bias, scales)
        found.choose(device, out, a, b, bias, aux, scales)
        _PLANS[product] = found
    return found


_PLANS: dict[Product, "Plan"] = {}


class Plan:
    """A product's descriptors and algorithm; they stay for the rest of the process, a few hundred bytes a shape.

    Args:
        product: what to compute.
        bias, scales: those of its first run: what the library offers for FP8 may depend on whether there are any.

    Attributes:
        candidates: the heuristic's, what it holds best first; chosen: the index of the one that `run` uses.

    Raises:
        ValueError: there is no candidate.
    """

    def __init__(self, product: Product, bias: Any, scales: Scales) -> None:
        self.product = product
        lib, p = _library(), product
        self._operation = c_void_p()
        _check(
            lib.cublasLtMatmulDescCreate(byref(self._operation), _COMPUTE[p.precision], _TYPES[FLOAT]),
            "MatmulDescCreate",
        )
        self._set(_TRANSPOSE_FIRST, c_int32(int(p.transpose_b)))
        self._set(_TRANSPOSE_SECOND, c_int32(int(p.transpose_a)))
        self._set(_EPILOGUE, c_int32(_EPILOGUES[p.epilogue]))
        if "gelu" in p.epilogue:
            self._set(_AUX_ROW, c_int64(p.n))
        self._set(_FAST_SUMS, c_int8("fast" in p.precision))
        self._point(bias if "fp8" in p.precision else None, None, scales)
        self._first = _layout(p.inputs, *((p.k, p.n) if p.transpose_b else (p.n, p.k)), p.batch)
        self._second = _layout(p.inputs, *((p.m, p.k) if p.transpose_a else (p.k, p.m)), p.batch)
        self._out = _layout(p.output, p.n, p.m, p.batch)
        self._one, self._beta = c_float(1), c_float(int(p.accumulate))
        self.candidates = self._offered()
        if not self.candidates:
            instead = "numerics.precision to bf16" if "fp8" in p.precision else "numerics.matmul to own"
            raise ValueError(f"cuBLASLt has no algorithm for {p}; set {instead}")
        self.chosen = 0

    def _set(self, attribute: int, value: Any) -> None:
        status = _library().cublasLtMatmulDescSetAttribute(
            self._operation, attribute, byref(value), sizeof(value)
        )
        _check(status, "MatmulDescSetAttribute")

    def _point(self, bias: Any, aux: Any, scales: Scales) -> None:
        for attribute, array in zip((_BIAS, _AUX, *_SCALES), (bias, aux, *scales), strict=True):
            if array is not None:
                self._set(attribute, c_void_p(array.data.ptr))

    def run(
        self, device: Device, out: Any, a: Any, b: Any, candidate: int | None = None, addend: Any = None, bias: Any = None,
        aux: Any = None, scales: Scales = (None, None),
    ) -> None:  # fmt: skip
        """Start the product. `addend` is added in place of what out holds, where the product accumulates."""
        self._point(bias, aux, scales)
        algorithm = self.candidates[self.chosen if candidate is None else candidate].algorithm
        workspace: Any = device.workspace(((WORKSPACE_BYTES,), np.uint8))[0]
        status = _library().cublasLtMatmul(
            _handle(), self._operation, byref(self._one), b.data.ptr, self._first, a.data.ptr, self._second,
            byref(self._beta), (out if addend is None else addend).data.ptr, self._out, out.data.ptr, self._out,
            byref(algorithm), workspace.data.ptr, WORKSPACE_BYTES, device.stream.ptr,
        )  # fmt: skip
        _check(status, f"Matmul ({self.product})")

    def choose(self, device: Device, out: Any, a: Any, b: Any, bias: Any, aux: Any, scales: Scales) -> None:
        """Take the recorded choice, or time the candidates and record the fastest.

        A product that overwrites is timed on `out` itself, which then holds the product. One that accumulates must not add twice:
        it reads `out` and writes to memory allocated for the while; where there is none, the first candidate is taken untimed.
        """
        path, key = user_cache() / "cuda" / CHOICES, f"{device.model}; cuBLASLt {version()}; {self.product}"
        recorded = choices.recorded(path).get(key)
        if recorded is not None and recorded["candidate"] < len(self.candidates):
            self.chosen = recorded["candidate"]
            return
        times: list[float] = []
        target = _scratch(out) if self.product.accumulate else out
        if target is not None and len(self.candidates) > 1:
            works = [
                partial(self.run, device, target, a, b, i, out, bias, aux, scales)
                for i in range(len(self.candidates))
            ]
            times = milliseconds(device, works)
            self.chosen = next(i for i, ms in enumerate(times) if ms <= _MARGIN * min(times))
        choices.record(
            path, key, {"candidate": self.chosen, "ms": round(times[self.chosen], 6) if times else None}
        )

    def _offered(self) -> list[_Candidate]:
        lib, preference, count = _library(), c_void_p(), c_int()
        _check(lib.cublasLtMatmulPreferenceCreate(byref(preference)), "MatmulPreferenceCreate")
        a, b, out = self.product.alignments
        values: list[tuple[int, Any]] = [
            (_MAX_WORKSPACE, c_uint64(WORKSPACE_BYTES)),
            (_REDUCTION_SCHEMES, c_uint32(_REDUCE_IN_COMPUTE_TYPE)),
            *(
                (attribute, c_uint32(size))
                for attribute, size in zip(_ALIGNMENTS, (b, a, out, out), strict=True)
            ),
        ]
        for attribute, value in values:
            status = lib.cublasLtMatmulPreferenceSetAttribute(
                preference, attribute, byref(value), sizeof(value)
            )
            _check(status, "MatmulPreferenceSetAttribute")
        offered = (_Candidate * _CANDIDATES)()
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            _handle(), self._operation, self._first, self._second, self._out, self._out, preference, _CANDIDATES, offered,
            byref(count),
        )  # fmt: skip
        lib.cublasLtMatmulPreferenceDestroy(preference)
        return [one for one in offered[: count.value] if status == 0 and one.status == 0]


def _scratch(like: Any) -> Any:
    """An array of this shape and type in memory of its own, which the GPU has back when it goes; None where there is no room."""
    try:
        memory = cupy.cuda.memory.Memory(like.nbytes)
    except (cupy.cuda.runtime.CUDARuntimeError, MemoryError):
        return None
    return cupy.ndarray(like.shape, like.dtype, cupy.cuda.memory.MemoryPointer(memory, 0))


def _alignment(array: Any) -> int:
    apart = array.strides[0] if array.ndim == 3 else 0
    return next((size for size in _BYTES if array.data.ptr % size == 0 and apart % size == 0), 1)


def _layout(dtype: np.dtype[Any], rows: int, columns: int, batch: int) -> c_void_p:
    """Of column-major matrices without gaps."""
    layout = c_void_p()
    status = _library().cublasLtMatrixLayoutCreate(byref(layout), _TYPES[dtype], rows, columns, rows)
    _check(status, "MatrixLayoutCreate")
    for attribute, value in (
        ((_BATCH_COUNT, c_int32(batch)), (_BATCH_OFFSET, c_int64(rows * columns))) if batch > 1 else ()
    ):
        status = _library().cublasLtMatrixLayoutSetAttribute(layout, attribute, byref(value), sizeof(value))
        _check(status, "MatrixLayoutSetAttribute")
    return layout


def version() -> int:
    """Of the library, 130101 for 13.1.1."""
    return int(_library().cublasLtGetVersion())


@cache
def _library() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(load_nvidia_dynamic_lib("cublasLt").abs_path))
    except Exception as error:  # pathfinder has a dozen of its own
        raise ValueError(f"CUDA: the library cuBLASLt was not found ({error}); {INSTALL}") from None
    lib.cublasLtGetVersion.restype = c_size_t
    lib.cublasLtMatrixLayoutCreate.argtypes = [c_void_p, c_int, c_uint64, c_uint64, c_int64]
    lib.cublasLtMatrixLayoutSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    lib.cublasLtMatmulDescSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    lib.cublasLtMatmulPreferenceSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    lib.cublasLtMatmulPreferenceDestroy.argtypes = [c_void_p]
    lib.cublasLtMatmulAlgoGetHeuristic.argtypes = [c_void_p] * 7 + [c_int, c_void_p, c_void_p]
    lib.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
    return lib


@cache
def _handle() -> c_void_p:
    """Of the GPU that this process computes on."""
    handle = c_void_p()
    _check(_library().cublasLtCreate(byref(handle)), "Create")
    return handle


def _check(status: int, call: str) -> None:
    if status:
        raise ValueError(f"CUDA: cublasLt{call} failed with cuBLAS status {status}")
