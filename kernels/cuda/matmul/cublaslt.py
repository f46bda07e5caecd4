"""Matmuls with cuBLASLt, called through ctypes. Each shape runs with the fastest algorithm.

The first matmul of a shape makes its plan. It creates the descriptors and times the candidates of the
library's heuristic on the given arrays. The choice is recorded in the user's cache folder, so that a later
process computes the same bits. After that a matmul is one call on the device's stream, and a CUDA graph can
capture it.

cuBLASLt is column-major. So it computes the transpose, out^T = op(b)^T op(a)^T. Its first operand is our b.

Determinism: split-K algorithms must keep their partial sums in fp32 in the workspace, and add them in a
second step. The other two schemes round partial sums to the type of `out`. One of them adds in place.
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
WORKSPACE_BYTES = 32 << 20  # NVIDIA's recommendation for Hopper
INSTALL = (
    "python -m pip install nvidia-cublas, of CUDA 13.0, or set numerics.matmul to custom "
    "(and precision fp8 to bf16)"
)

# cudaDataType, cublasComputeType_t, and attributes from cublasLt.h.
_TYPES, _NAMES = {FLOAT: 0, BF16: 14, E4M3: 28}, {FLOAT: "fp32", BF16: "bf16", E4M3: "e4m3"}
_COMPUTE = {"fp32": 68, "bf16": 68, "tf32": 77, "fp8": 68, "fp8 fast": 68}
_BATCH_COUNT, _BATCH_OFFSET = 5, 6
_TRANSPOSE_FIRST, _TRANSPOSE_SECOND, _EPILOGUE, _BIAS, _AUX, _AUX_ROW = 3, 4, 7, 8, 11, 12
_SCALES, _FAST_SUMS = (18, 17), 25  # scales of our a, the library's second operand, and of b
_EPILOGUES = {"": 1, "bias": 4, "gelu": 160, "bias gelu": 164, "gelu backward": 192}
_MAX_WORKSPACE, _REDUCTION_SCHEMES, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_REDUCE_IN_COMPUTE_TYPE = 2
_CANDIDATES = 8
_BYTES = (16, 8, 4, 2)  # address alignments that a plan distinguishes
# The first candidate within this margin of the fastest is chosen. So noise does not decide a near tie.
_MARGIN = 1.01


class _Candidate(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace_bytes", c_size_t), ("status", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


class MatmulShape(NamedTuple):
    """A matmul: out (m, n) = op(a) (m, k) @ op(b) (k, n). Arrays are row-major.

    Args:
        m, n, k: extents.
        transpose_a, transpose_b: whether op transposes the operand.
        accumulate: add to out.
        inputs, output: element types.
        precision: the operands are rounded to it: "fp32", "tf32", "bf16", "fp8" or "fp8 fast". "fp8 fast"
            also accumulates in fewer bits.
        alignments: of the addresses of a, b and out, in bytes. They hold for every matrix of a batch.
        epilogue: applied to each sum before it is rounded, "" for none. "bias" adds a row (n,). "gelu" stores
            the sum in `aux` (m, n) and then applies GELU. "bias gelu" does both. "gelu backward" multiplies
            by GELU's derivative at aux. Bias and aux have the output's type.
        batch: number of matmuls. Arrays with a batch are (batch, ..) and have no epilogue.
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
        op_a, op_b = "NT"[self.transpose_a], "NT"[self.transpose_b]
        operation = f"{op_a}{op_b}{'+' if self.accumulate else ''}"
        alignments = ",".join(map(str, self.alignments))
        epilogue = f" {self.epilogue}" if self.epilogue else ""
        types = f"{_NAMES[self.inputs]}-{_NAMES[self.output]} {self.precision}{epilogue}"
        batch = f"{self.batch} of " if self.batch > 1 else ""
        return f"{batch}{self.m}x{self.n}x{self.k} {operation} {types} {alignments}"


def multiply(
    device: Device, out: Any, a: Any, b: Any, *, precision: str, transpose_a: bool = False,
    transpose_b: bool = False, accumulate: bool = False, epilogue: str = "", bias: Any = None,
    aux: Any = None, scales: Scales = (None, None),
) -> None:  # fmt: skip
    """out (+)= op(a) @ op(b) with an epilogue. The first call for a shape times the candidates.

    Args:
        device: the GPU.
        out, a, b: row-major arrays. out must not alias a or b.
        precision, transpose_a, transpose_b, accumulate, epilogue, bias, aux: see MatmulShape.
        scales: of a and b, () fp32 at multiples of 16 bytes. FP8 requires scales, a transposed b, and n and k
            that are multiples of 16.

    Raises:
        ValueError: the library is missing, or has no algorithm for the matmul.
    """
    shape = matmul_shape(
        out, a, b, precision=precision, transpose_a=transpose_a, transpose_b=transpose_b,
        accumulate=accumulate, epilogue=epilogue,
    )  # fmt: skip
    found = plan(device, shape, out, a, b, bias=bias, aux=aux, scales=scales)
    found.run(device, out, a, b, bias=bias, aux=aux, scales=scales)


def matmul_shape(
    out: Any, a: Any, b: Any, *, precision: str, transpose_a: bool = False, transpose_b: bool = False,
    accumulate: bool = False, epilogue: str = "",
) -> MatmulShape:  # fmt: skip
    """The shape of the matmul that `multiply` computes for these arguments."""
    *batch, m, n = out.shape
    k = a.shape[-2 if transpose_a else -1]
    shape = MatmulShape(
        m, n, k, transpose_a, transpose_b, accumulate, a.dtype, out.dtype, precision,
        (_alignment(a), _alignment(b), _alignment(out)), epilogue, *batch,
    )  # fmt: skip
    assert a.shape == (*batch, *((k, m) if transpose_a else (m, k))), shape
    assert b.shape == (*batch, *((n, k) if transpose_b else (k, n))), shape
    assert a.dtype == b.dtype and all(x.flags.c_contiguous for x in (out, a, b)), shape
    return shape


def plan(
    device: Device, shape: MatmulShape, out: Any, a: Any, b: Any, *, bias: Any = None, aux: Any = None,
    scales: Scales = (None, None),
) -> "Plan":  # fmt: skip
    """The plan of a shape, made at its first call. Timing may overwrite `out` with the result."""
    found = _PLANS.get(shape)
    if found is None:
        assert not device.stream.is_capturing(), f"cuBLASLt: {shape} must run once before a graph captures it"
        found = Plan(shape, bias, scales)
        found.choose(device, out, a, b, bias, aux, scales)
        _PLANS[shape] = found
    return found


_PLANS: dict[MatmulShape, "Plan"] = {}


class Plan:
    """The descriptors and the algorithm of one shape. They take a few hundred bytes until the process ends.

    Args:
        shape: the matmul.
        bias, scales: of the first run. With FP8 the library's candidates may depend on whether they are
            given.

    Attributes:
        candidates: the algorithms that the heuristic returns, its best guess first.
        chosen: the index of the candidate that `run` uses.

    Raises:
        ValueError: there is no candidate.
    """

    def __init__(self, shape: MatmulShape, bias: Any, scales: Scales) -> None:
        self.shape = shape
        lib, p = _library(), shape
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
        self._set_pointers(bias if "fp8" in p.precision else None, None, scales)
        self._first = _layout(p.inputs, *((p.k, p.n) if p.transpose_b else (p.n, p.k)), p.batch)
        self._second = _layout(p.inputs, *((p.m, p.k) if p.transpose_a else (p.k, p.m)), p.batch)
        self._out = _layout(p.output, p.n, p.m, p.batch)
        self._one, self._beta = c_float(1), c_float(int(p.accumulate))
        self.candidates = self._find_candidates()
        if not self.candidates:
            instead = "numerics.precision to bf16" if "fp8" in p.precision else "numerics.matmul to custom"
            raise ValueError(f"cuBLASLt has no algorithm for {p}; set {instead}")
        self.chosen = 0

    def _set(self, attribute: int, value: Any) -> None:
        status = _library().cublasLtMatmulDescSetAttribute(
            self._operation, attribute, byref(value), sizeof(value)
        )
        _check(status, "MatmulDescSetAttribute")

    def _set_pointers(self, bias: Any, aux: Any, scales: Scales) -> None:
        for attribute, array in zip((_BIAS, _AUX, *_SCALES), (bias, aux, *scales), strict=True):
            if array is not None:
                self._set(attribute, c_void_p(array.data.ptr))

    def run(
        self, device: Device, out: Any, a: Any, b: Any, candidate: int | None = None, addend: Any = None,
        bias: Any = None, aux: Any = None, scales: Scales = (None, None),
    ) -> None:  # fmt: skip
        """Start the matmul. If it accumulates, `addend` is added instead of the values in out."""
        self._set_pointers(bias, aux, scales)
        algorithm = self.candidates[self.chosen if candidate is None else candidate].algorithm
        workspace: Any = device.workspace(((WORKSPACE_BYTES,), np.uint8))[0]
        status = _library().cublasLtMatmul(
            _handle(), self._operation, byref(self._one), b.data.ptr, self._first, a.data.ptr, self._second,
            byref(self._beta), (out if addend is None else addend).data.ptr, self._out, out.data.ptr,
            self._out, byref(algorithm), workspace.data.ptr, WORKSPACE_BYTES, device.stream.ptr,
        )  # fmt: skip
        _check(status, f"Matmul ({self.shape})")

    def choose(self, device: Device, out: Any, a: Any, b: Any, bias: Any, aux: Any, scales: Scales) -> None:
        """Use the recorded choice, or time the candidates and record the fastest.

        A matmul that overwrites is timed on `out` itself. A matmul that accumulates must not add twice: the
        timed runs read `out` and write to temporary memory. If the GPU has none left, the first candidate is
        chosen untimed.
        """
        path, key = user_cache() / "cuda" / CHOICES, f"{device.model}; cuBLASLt {version()}; {self.shape}"
        recorded = choices.recorded(path).get(key)
        if recorded is not None and recorded["candidate"] < len(self.candidates):
            self.chosen = recorded["candidate"]
            return
        times: list[float] = []
        target = _scratch(out) if self.shape.accumulate else out
        if target is not None and len(self.candidates) > 1:
            works = [
                partial(self.run, device, target, a, b, i, out, bias, aux, scales)
                for i in range(len(self.candidates))
            ]
            times = milliseconds(device, works)
            self.chosen = next(i for i, ms in enumerate(times) if ms <= _MARGIN * min(times))
        ms = round(times[self.chosen], 6) if times else None
        choice = choices.record(path, key, {"candidate": self.chosen, "ms": ms}, replaces=recorded)
        self.chosen = choice["candidate"]

    def _find_candidates(self) -> list[_Candidate]:
        lib, preference, count = _library(), c_void_p(), c_int()
        _check(lib.cublasLtMatmulPreferenceCreate(byref(preference)), "MatmulPreferenceCreate")
        a, b, out = self.shape.alignments
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
        found = (_Candidate * _CANDIDATES)()
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            _handle(), self._operation, self._first, self._second, self._out, self._out, preference,
            _CANDIDATES, found, byref(count),
        )  # fmt: skip
        lib.cublasLtMatmulPreferenceDestroy(preference)
        return [candidate for candidate in found[: count.value] if status == 0 and candidate.status == 0]


def _scratch(like: Any) -> Any:
    """An array like this one, in memory that is freed with it. None if the GPU has too little memory."""
    try:
        memory = cupy.cuda.memory.Memory(like.nbytes)
    except (cupy.cuda.runtime.CUDARuntimeError, MemoryError):
        return None
    return cupy.ndarray(like.shape, like.dtype, cupy.cuda.memory.MemoryPointer(memory, 0))


def _alignment(array: Any) -> int:
    batch_stride = array.strides[0] if array.ndim == 3 else 0
    return next((size for size in _BYTES if array.data.ptr % size == 0 and batch_stride % size == 0), 1)


def _layout(dtype: np.dtype[Any], rows: int, columns: int, batch: int) -> c_void_p:
    """The layout of contiguous column-major matrices."""
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
    """The version of the library: 130101 is 13.1.1."""
    return int(_library().cublasLtGetVersion())


@cache
def _library() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(load_nvidia_dynamic_lib("cublasLt").abs_path))
    except Exception as error:  # pathfinder raises many types
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
    """The library's handle for this process's GPU."""
    handle = c_void_p()
    _check(_library().cublasLtCreate(byref(handle)), "Create")
    return handle


def _check(status: int, call: str) -> None:
    if status:
        raise ValueError(f"CUDA: cublasLt{call} failed with cuBLAS status {status}")
