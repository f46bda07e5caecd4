"""The CPU's operations: loops that Numba compiles, and the reference implementation of every operation.

Each file holds one operation with its mathematics. `CpuOps` collects them for the model.
"""

import math
import os
from collections.abc import Callable, Hashable
from typing import Any

import numba
import numpy as np
import psutil

from kernels.config import ModelConfig
from kernels.cpu import jit as jit  # first: it configures Numba before any function is compiled
from kernels.cpu.adamw import adamw
from kernels.cpu.attention import attention_backward, attention_forward
from kernels.cpu.bias import bias_backward, bias_forward
from kernels.cpu.cross_entropy import cross_entropy_backward, cross_entropy_forward
from kernels.cpu.decode_attention import decode_attention_forward
from kernels.cpu.embedding import embedding_backward, embedding_forward
from kernels.cpu.gelu import gelu_backward, gelu_forward
from kernels.cpu.grad_norm import CHUNK, grad_norm, square_sums
from kernels.cpu.layernorm import (
    layernorm_backward,
    layernorm_forward,
    residual_layernorm_backward,
    residual_layernorm_forward,
)
from kernels.cpu.matmul import matmul_backward, matmul_forward
from kernels.cpu.matmul_gelu import matmul_gelu_backward, matmul_gelu_forward
from kernels.cpu.muon import muon
from kernels.cpu.qk_norm import qk_norm_backward, qk_norm_forward
from kernels.cpu.rmsnorm import (
    residual_rmsnorm_backward,
    residual_rmsnorm_forward,
    rmsnorm_backward,
    rmsnorm_forward,
)
from kernels.cpu.rope import rope_backward, rope_forward, rope_table
from kernels.cpu.sample import sample, suppress_tokens
from kernels.cpu.swiglu import swiglu_backward, swiglu_forward
from kernels.cpu.weighted_sum import weighted_sum_forward
from kernels.ops import DecodeStepOps, Fp8Ops, Graphs

Array = np.ndarray[Any, Any]


class CpuOps:
    """Every operation of the model on the CPU.

    Args:
        dtype: np.float32 to run, np.float64 to check gradients.
        threads: of the loops; 0 takes every core this process may use.

    Raises:
        ValueError: more threads than cores.
    """

    name = "cpu"
    asynchronous = False
    fp8: Fp8Ops | None = None
    decode_step_ops: DecodeStepOps | None = None

    def __init__(self, dtype: type[np.floating[Any]] = np.float32, threads: int = 0) -> None:
        available = numba.config.NUMBA_NUM_THREADS
        if not 0 <= threads <= available:
            raise ValueError(
                f"runtime.threads: expected 0 (all) to {available} on this machine, got {threads}"
            )
        self.dtype = self.storage = np.dtype(dtype)
        self.threads = threads or available
        numba.set_num_threads(self.threads)

    embedding_forward = staticmethod(embedding_forward)
    embedding_backward = staticmethod(embedding_backward)
    rmsnorm_forward = staticmethod(rmsnorm_forward)
    rmsnorm_backward = staticmethod(rmsnorm_backward)
    residual_rmsnorm_forward = staticmethod(residual_rmsnorm_forward)
    residual_rmsnorm_backward = staticmethod(residual_rmsnorm_backward)
    layernorm_forward = staticmethod(layernorm_forward)
    layernorm_backward = staticmethod(layernorm_backward)
    residual_layernorm_forward = staticmethod(residual_layernorm_forward)
    residual_layernorm_backward = staticmethod(residual_layernorm_backward)
    matmul_forward = staticmethod(matmul_forward)
    matmul_backward = staticmethod(matmul_backward)
    matmul_gelu_forward = staticmethod(matmul_gelu_forward)
    matmul_gelu_backward = staticmethod(matmul_gelu_backward)
    bias_forward = staticmethod(bias_forward)
    bias_backward = staticmethod(bias_backward)
    qk_norm_forward = staticmethod(qk_norm_forward)
    qk_norm_backward = staticmethod(qk_norm_backward)
    rope_forward = staticmethod(rope_forward)
    rope_backward = staticmethod(rope_backward)
    attention_forward = staticmethod(attention_forward)
    attention_backward = staticmethod(attention_backward)
    decode_attention_forward = staticmethod(decode_attention_forward)
    gelu_forward = staticmethod(gelu_forward)
    gelu_backward = staticmethod(gelu_backward)
    swiglu_forward = staticmethod(swiglu_forward)
    swiglu_backward = staticmethod(swiglu_backward)
    cross_entropy_forward = staticmethod(cross_entropy_forward)
    cross_entropy_backward = staticmethod(cross_entropy_backward)
    weighted_sum_forward = staticmethod(weighted_sum_forward)
    square_sums = staticmethod(square_sums)
    grad_norm = staticmethod(grad_norm)
    norm_chunk = CHUNK
    adamw = staticmethod(adamw)
    muon = staticmethod(muon)
    sample = staticmethod(sample)
    suppress_tokens = staticmethod(suppress_tokens)

    def allocate(self, size: int) -> Array:
        """`size` zeroed bytes that begin at a cache line."""
        memory = np.zeros(size + 64, np.uint8)
        begin = -memory.ctypes.data % 64
        return memory[begin : begin + size]

    def allocate_shared(self, size: int) -> tuple[Array, Array]:
        """The same memory twice."""
        memory = self.allocate(size)
        return memory, memory

    def memory_bytes(self) -> int:
        """Memory of the machine."""
        return int(psutil.virtual_memory().total)

    def used_bytes(self) -> int:
        """Memory that this process holds."""
        return int(psutil.Process().memory_info().rss)

    def workspace_bytes(self, config: ModelConfig, rows: int) -> int:
        """Nothing: each operation allocates its scratch memory itself."""
        return 0

    def use_workspace(self, workspace: Array) -> None:
        """Never called, since workspace_bytes is 0."""

    def upload(self, target: Array, source: Any) -> None:
        """Copy into an array."""
        target[...] = source

    def download(self, array: Array) -> Array:
        """A copy of an array."""
        return np.array(array)

    cast = copy = upload

    def layers_view(self, flat: Array, offset: int, shape: tuple[int, ...], stride: int) -> Array:
        """See kernels/ops.py."""
        size = flat.itemsize
        within = [size * math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))]
        return np.ndarray(shape, flat.dtype, flat, offset * size, (stride * size, *within))

    def fill_zero(self, array: Array) -> None:
        """Set every element to zero."""
        array[...] = 0

    def copy_rows(self, target: Array, source: Array, first: int, step: int) -> None:
        """target (n, C) = source (m, C)[first::step]."""
        target[...] = source[first::step]

    def new_graphs(self) -> Graphs:
        """Nothing is recorded."""
        return None

    def replay(self, graphs: Graphs, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work."""
        work()

    def record_event(self) -> None:
        """Everything that was started is done."""

    def synchronize(self, event: None = None) -> None:
        """Everything that was started is done."""

    def rope_table(self, context: int, head_dim: int, base: float) -> Array:
        """kernels.cpu.rope.rope_table in this object's precision."""
        return rope_table(context, head_dim, base).astype(self.dtype)

    def describe(self, config: ModelConfig) -> str:
        """Threads and versions, in a line."""
        processors = f"{self.threads} of {os.cpu_count()} processors"
        versions = f"NumPy {np.__version__}, Numba {numba.__version__}"
        return f"CPU, {processors}, {self.dtype.name}, {versions}"
