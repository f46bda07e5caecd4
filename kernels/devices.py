"""Choice of the device: the operations and the collectives of the CPU, or of a GPU."""

import ctypes
from typing import Any

import numpy as np

from kernels.config import Numerics
from kernels.cpu import CpuOps
from kernels.ops import Ops
from kernels.ranks import Link, OneRank, Ranks

DEVICES = ("auto", "cpu", "cuda")
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def open_ops(
    device: str,
    numerics: Numerics,
    *,
    threads: int = 0,
    dtype: type[np.floating[Any]] = np.float32,
    index: int = 0,
) -> Ops:
    """The operations of a device.

    Args:
        device: "cpu", "cuda", or "auto": the GPU if an NVIDIA GPU is visible, else the CPU. A GPU that cannot
            be used is an error; the CPU never takes its place silently.
        numerics: what the device must be able to compute.
        threads: CPU threads, 0 for all.
        dtype: np.float64 is for gradient checks, on the CPU.
        index: of the GPU among the visible ones.

    Raises:
        ValueError: the device is missing or lacks a library or the precision; the message says what to set.
    """
    if device not in DEVICES:
        raise ValueError(f"runtime.device: expected one of {', '.join(DEVICES)}, got {device!r}")
    if dtype == np.float64 or device == "cpu" or (device == "auto" and not gpu_visible()):
        if numerics.precision != "fp32":
            raise ValueError(
                f"numerics.precision: the CPU computes in fp32, got {numerics.precision}; set it to fp32"
            )
        return CpuOps(dtype, threads)
    try:
        from kernels.cuda import CudaOps
    except ImportError as error:
        raise ValueError(
            f"runtime.device: a GPU needs CuPy and CUDA's libraries ({error}): "
            "python -m pip install cupy-cuda13x -r requirements-cuda.lock; or set it to cpu"
        ) from None
    return CudaOps(numerics, index)


def open_ranks(link: Link, ops: Ops) -> Ranks:
    """The collectives for arrays of the device of these operations.

    Raises:
        ValueError: several GPUs without NCCL, or NCCL does not connect them.
    """
    if link.size == 1:
        return OneRank(link)
    if ops.name == "cpu":
        return Ranks(link)
    from kernels.cuda.nccl import NcclRanks

    return NcclRanks(link, ops)


def gpu_visible() -> bool:
    """Whether the NVIDIA driver is there and shows a GPU.

    Raises:
        ValueError: the driver is there but does not start.
    """
    return gpu_count() > 0


def gpu_count() -> int:
    """The number of GPUs that the NVIDIA driver shows, 0 without a driver.

    Raises:
        ValueError: the driver is there but does not start.
    """
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            driver = ctypes.CDLL(library)
        except OSError:
            continue
        count, status = ctypes.c_int(0), driver.cuInit(0)
        if status not in (0, NO_DEVICE):
            raise ValueError(
                f"runtime.device: the NVIDIA driver does not start (cuInit gives {status}); set it to cpu"
            )
        return count.value if status == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
    return 0
