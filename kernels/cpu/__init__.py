"""The CPU engine's operations: loops that Numba compiles.

Each file holds one operation and its mathematics. `CpuOps` collects the operations for the model.
"""

import os
from collections.abc import Callable, Hashable
from typing import Any

import numba
import numpy as np
import psutil

from kernels.config import ModelConfig
from kernels.cpu import jit as jit  # first: it configures Numba before any function compiles
from kernels.cpu.adamw import adamw
from kernels.cpu.attention import attention_backward, attention_forward
from kernels.cpu.bias import bias_backward, bias_forward
from kernels.cpu.cross_entropy import cross_entropy_backward, cross_entropy_forward
from kernels.cpu.decode_attention import decode_attention_forward
from kernels.cpu.embedding import embedding_backward, embedding_forward
from kernels.cpu.gelu import gelu_backward, gelu_forward
from kernels.cpu.grad_norm import grad_norm
from kernels.cpu.layernorm import (
    layernorm_backward,
    layernorm_forward,
    residual_layernorm_backward,
    residual_layernorm_forward,
)
from kernels.cpu.matmul import matmul_backward, matmul_forward
from kernels.cpu.matmul_gelu import matmul_gelu_backward, matmul_gelu_forward
from kernels.cpu.muon import muon
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

Array = np.ndarray[Any, Any]


class CpuOps:
    """Every operation of the model on the CPU.

    Args:
        dtype: np.float32 to run, np.float64 to check gradients.
        threads: the number of threads of each loop; 0 takes every core that this process may use.

    Raises:
        ValueError: threads is negative or larger than the number of cores.
    """

    name = "cpu"
    asynchronous = False  # each operation has finished when its call returns

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
    grad_norm = staticmethod(grad_norm)
    adamw = staticmethod(adamw)
    muon = staticmethod(muon)
    sample = staticmethod(sample)
    suppress_tokens = staticmethod(suppress_tokens)

    def upload(self, target: Array, source: Any) -> None:
        """Copy a host array into an array of the device, here the same memory."""
        target[...] = source

    def download(self, array: Array) -> Array:
        """A copy of an array of the device."""
        return np.array(array)

    def fill_zero(self, array: Array) -> None:
        """Set every element to zero."""
        array[...] = 0

    def copy_rows(self, target: Array, source: Array, first: int, step: int) -> None:
        """target (n, C) = source (m, C)[first::step]."""
        target[...] = source[first::step]

    def replay(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work. (The GPU records it as a graph under its key, and replays the graph from then on.)"""
        work()

    def mark(self) -> None:
        """A mark that `synchronize` can wait for. The CPU has nothing pending, so the mark is None."""

    def synchronize(self, mark: None = None) -> None:
        """Wait for all started work. The CPU has nothing pending."""

    def forget(self, owner: int) -> None:
        """Drop the graphs that `replay` recorded for the object of this id. The CPU records none."""

    def fused_rows(self, config: ModelConfig) -> int:
        """The largest number of rows that decode_step takes. The CPU has no decode_step: 0."""
        return 0

    def workspace_bytes(self, config: ModelConfig, rows: int) -> int:
        """Bytes of scratch memory to reserve. On the CPU each operation allocates its own: 0."""
        return 0

    def memory_bytes(self) -> int:
        """Bytes of memory in the machine."""
        return int(psutil.virtual_memory().total)

    def used_bytes(self) -> int:
        """Bytes of memory that this process holds."""
        return int(psutil.Process().memory_info().rss)

    def allocate(self, size: int) -> Array:
        """`size` zeroed bytes, aligned to a cache line of 64 bytes."""
        memory = np.zeros(size + 64, np.uint8)
        offset = -memory.ctypes.data % 64
        return memory[offset : offset + size]

    def allocate_shared(self, size: int) -> tuple[Array, Array]:
        """`size` zeroed bytes, as the host and as the device see them. On the CPU both are one array."""
        memory = self.allocate(size)
        return memory, memory

    def rope_table(self, context: int, head_dim: int, base: float) -> Array:
        """kernels.cpu.rope.rope_table, rounded to this object's dtype."""
        return rope_table(context, head_dim, base).astype(self.dtype)

    def describe(self, config: ModelConfig) -> str:
        """The device for the log: threads, precision and versions. It does not depend on the model."""
        processors = f"{self.threads} of {os.cpu_count()} processors"
        return f"CPU, {processors}, {self.dtype.name}, NumPy {np.__version__}, Numba {numba.__version__}"
