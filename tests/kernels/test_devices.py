"""The choice of a device, and what is said where it cannot be used; no GPU is needed."""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels import devices
from kernels.config import Numerics
from kernels.cpu import CpuOps


def driver(status: int, count: int) -> Any:
    """A driver's library as far as gpu_visible calls it."""

    def count_devices(target: Any) -> int:
        ctypes.cast(target, ctypes.POINTER(ctypes.c_int))[0] = count
        return 0

    return SimpleNamespace(cuInit=lambda flags: status, cuDeviceGetCount=count_devices)


def installed(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    """Whatever is asked for is this library; none where it is None."""

    def load(name: str) -> Any:
        if library is None:
            raise OSError(name)
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)


# A GPU that is passed over, or a CPU machine that is taken for one with a GPU.
@pytest.mark.parametrize(
    ("library", "visible"),
    [(None, False), (driver(100, 0), False), (driver(0, 0), False), (driver(0, 2), True)],
)
def test_gpu_visible(library: Any, visible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, library)
    assert devices.gpu_visible() == visible


# Training that goes on for days on the CPU because the GPU's driver is broken.
def test_a_driver_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, driver(803, 0))
    with pytest.raises(
        ValueError, match=r"^runtime\.device: the NVIDIA driver does not start \(cuInit gives 803\); "
    ):
        devices.open_ops("auto", Numerics())


# The same because a package is missing.
def test_a_gpu_without_cupy_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, driver(0, 1))
    monkeypatch.setitem(sys.modules, "kernels.cuda", None)
    with pytest.raises(
        ValueError, match=r"^runtime\.device: a GPU needs CuPy .* pip install .*; or set it to cpu$"
    ):
        devices.open_ops("auto", Numerics())


# float64 is for the gradient check, and the CPU alone has it; bf16 is the GPU's.
def test_what_the_cpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, driver(0, 1))
    assert isinstance(devices.open_ops("auto", Numerics(), dtype=np.float64), CpuOps)
    installed(monkeypatch, None)
    assert isinstance(devices.open_ops("auto", Numerics()), CpuOps)
    with pytest.raises(
        ValueError, match=r"^numerics\.precision: the CPU computes in fp32, got bf16; set it to fp32$"
    ):
        devices.open_ops("cpu", Numerics(precision="bf16"))


class RuntimeFailedError(RuntimeError):
    """In CUDARuntimeError's place, which only CuPy can make."""


def cupy_with(monkeypatch: pytest.MonkeyPatch, **runtime: Any) -> Any:
    """The module kernels.cuda.runtime.device over a CuPy whose runtime is this."""
    device = pytest.importorskip("kernels.cuda.runtime.device", exc_type=ImportError)
    fake = SimpleNamespace(CUDARuntimeError=RuntimeFailedError, **runtime)
    monkeypatch.setattr(device.cupy.cuda, "runtime", fake)
    return device


def failing(*_: Any) -> None:
    """A call that the driver refuses."""
    raise RuntimeFailedError("CUDA driver version is insufficient for CUDA runtime version")


# A traceback where a line would do: no driver or one too old, no GPU, one too old, memory that is gone, a
# kernel that failed.
def test_a_gpu_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device = cupy_with(monkeypatch, getDeviceCount=failing)
    with pytest.raises(
        ValueError, match=r"^runtime\.device: .* driver for CUDA 13 \(CUDA driver version.*set it to cpu$"
    ):
        device.Device()
    cupy_with(monkeypatch, getDeviceCount=lambda: 0)
    with pytest.raises(ValueError, match=r"^runtime\.device: no CUDA GPU is visible; set it to cpu$"):
        device.Device()
    old = {"name": b"Quadro", "major": 7, "minor": 5, "multiProcessorCount": 4}
    monkeypatch.setattr(device.cupy.cuda, "Device", lambda index: SimpleNamespace(id=index, use=lambda: None))
    cupy_with(monkeypatch, getDeviceCount=lambda: 1, getDeviceProperties=lambda index: old)
    with pytest.raises(
        ValueError, match=r"^runtime\.device: Quadro is too old \(\(7, 5\), needed is \(8, 0\)\); "
    ):
        device.Device()


def test_memory_that_is_gone_and_a_kernel_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = cupy_with(monkeypatch, memGetInfo=lambda: (2**30, 2**33))
    broken = device.Device.__new__(device.Device)

    class Stream:
        synchronize = staticmethod(failing)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    def full(*_: Any) -> None:
        raise device.cupy.cuda.memory.OutOfMemoryError(1, 2)

    broken.stream = Stream()
    monkeypatch.setattr(device.cupy, "zeros", full)
    with pytest.raises(
        ValueError, match=r"^memory: the GPU has no 4\.0 GiB left, 1\.0 are free; set a smaller micro_batch"
    ):
        broken.allocate(2**32)
    with pytest.raises(
        ValueError, match=r"^CUDA: a kernel failed: .*; `compute-sanitizer python -m stages\.NAME` says which"
    ):
        broken.synchronize()
    with pytest.raises(ValueError, match=r"^CUDA: a kernel failed: "):
        broken.synchronize(Stream())


# NVRTC, its headers, or code that does not compile: the log has to be in the message.
def test_a_compiler_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    nvrtc = pytest.importorskip("kernels.cuda.runtime.compile", exc_type=ImportError)

    def missing(name: str) -> None:
        raise RuntimeError(f"no {name}")

    monkeypatch.setenv("NANOEULER_CACHE", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"(?s)^CUDA: suppress_tokens\.cu does not compile as nothing<float> with .*nothing"
    ):
        nvrtc.compile_instance("suppress_tokens.cu", "nothing<float>", "sm_90")
    monkeypatch.setattr(nvrtc, "find_nvidia_header_directory", lambda name: None)
    nvrtc._headers.cache_clear()
    with pytest.raises(
        ValueError, match=r"^CUDA: the headers \(cuda_bf16\.h\) were not found; python -m pip install nvidia-"
    ):
        nvrtc.compile_instance("suppress_tokens.cu", "suppress_tokens<float>", "sm_90")
    nvrtc._headers.cache_clear()
    monkeypatch.setattr(nvrtc, "load_nvidia_dynamic_lib", missing)
    nvrtc._nvrtc.cache_clear()
    with pytest.raises(
        ValueError,
        match=r"^CUDA: the compiler library NVRTC was not found \(no nvrtc\); python -m pip install",
    ):
        nvrtc.compile_instance("suppress_tokens.cu", "other<float>", "sm_90")
    nvrtc._nvrtc.cache_clear()
