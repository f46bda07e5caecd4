"""Programmatic dependent launch: a kernel may start before the previous kernel on the stream has ended.

CuPy does not support it, so this module calls the driver's cuLaunchKernelEx. Captured in a CUDA graph, the
launch becomes a programmatic edge. The device code is include/dependent_launch.cuh.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import cupy

from kernels.cuda.runtime.driver import driver


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number, and a union of 64 bytes. Only the union's int is used here."""

    _fields_ = (
        ("number", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_byte * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


_PROGRAMMATIC_STREAM_SERIALIZATION = 6


def launch_dependent(
    function: int,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[Any],
    shared_bytes: int,
    stream: int,
) -> None:
    """Launch a driver function. `arguments` come from kernels.cuda.runtime.launch.arguments.

    Raises:
        cupy.cuda.driver.CUDADriverError: the driver rejects the launch.
    """
    attribute = _Attribute(number=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    config = _Config(
        (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid))),
        (ctypes.c_uint * 3)(*block, *[1] * (3 - len(block))),
        shared_bytes, stream, ctypes.pointer(attribute), 1,
    )  # fmt: skip
    values = [_value(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    cupy.cuda.driver.check_status(
        driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None)
    )


def _value(argument: Any) -> Any:
    """The bytes of an argument in host memory. For an array they are its device address."""
    if isinstance(argument, cupy.ndarray):
        return ctypes.c_void_p(argument.data.ptr)
    return ctypes.create_string_buffer(argument.tobytes())
