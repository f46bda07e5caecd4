"""How an operation of kernels/cuda is tested against the one of the same name in kernels/cpu.

A test writes one `run(side, a)`: it makes its arrays with the side's `stored`, `single` and `same`, calls the
CPU's functions through `side(function, ...)`, and returns what they wrote. It is run four times: as the
oracle (CPU, float64), as the baseline (CPU, float32, rounded to the storage type wherever CUDA stores), and
twice on the GPU.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernels.config import Numerics
from kernels.cpu import CpuOps
from tests.compare import Array, Arrays, assert_same_bits, assert_within

if TYPE_CHECKING:
    from kernels.cuda.runtime.device import Device

# As kernels.cuda.runtime.launch has them; that module cannot be imported where CuPy is missing.
FLOAT, BF16 = np.dtype(np.float32), np.dtype(np.uint16)
STORAGES = (FLOAT, BF16)
# Largest relative error of one rounding, to nearest.
UNIT = {FLOAT: 2.0**-24, BF16: 2.0**-8}
# fp32 roundings that are always allowed: the baseline of a tensor of few elements may happen to have none.
ROUNDINGS = 16
WORKSPACE_BYTES = 1 << 28


@cache
def gpu() -> "Device":
    """The GPU, with a workspace; the calling test is skipped where there is none."""
    if find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    from kernels.cuda.runtime.device import Device

    try:
        device = Device()
    except ValueError as error:
        pytest.skip(str(error))
    device.use_workspace(device.allocate(WORKSPACE_BYTES))
    return device


class Cpu:
    """The CPU's operations in one precision.

    Args:
        precision: float64 for the oracle, float32 for the baseline.
        storage: FLOAT or BF16: what activations are rounded to; the oracle rounds its inputs alone.
    """

    def __init__(self, precision: type[Any], storage: np.dtype[Any]) -> None:
        self.precision, self.storage = precision, storage
        self._stored: list[Array] = []

    def stored(self, host: Array) -> Array:
        """A copy in the storage type: activations, their gradients, weights as products read them."""
        array = rounded(host, self.storage).astype(self.precision)
        self._stored.append(array)
        return array

    def single(self, host: Array) -> Array:
        """A copy in fp32: statistics, parameter gradients, tables."""
        return host.astype(np.float32).astype(self.precision)

    def same(self, host: Array) -> Array:
        """A copy in its own type: ids, masks, 0-d numbers."""
        return host.copy()

    def ops(self) -> CpuOps:
        """All operations."""
        return CpuOps()

    def __call__(self, function: Callable[..., Any], *arrays: Any, **options: Any) -> None:
        function(*arrays, **options)
        if self.precision is np.float32:
            for array in arrays:
                if any(one is array or one is getattr(array, "base", None) for one in self._stored):
                    array[...] = rounded(array, self.storage)

    def host(self, array: Array) -> Array:
        """What it holds."""
        return array


class Gpu:
    """The GPU's operations of the same names."""

    def __init__(self, storage: np.dtype[Any]) -> None:
        self.device, self.storage = gpu(), storage

    def stored(self, host: Array) -> Array:
        """A device array of the storage type."""
        return on_gpu(self.device, host, self.storage)

    def single(self, host: Array) -> Array:
        """A device array of fp32."""
        return on_gpu(self.device, host, FLOAT)

    def same(self, host: Array) -> Array:
        """A device array of the host array's type."""
        return on_gpu(self.device, host, host.dtype)

    def ops(self) -> Any:
        """All operations."""
        from kernels.cuda import CudaOps

        return CudaOps(Numerics())

    def __call__(self, function: Callable[..., Any], *arrays: Any, **options: Any) -> None:
        from kernels.cuda import CudaOps

        getattr(CudaOps, function.__name__)(self.device, *arrays, **options)

    def host(self, array: Array) -> Array:
        """What it holds, bf16 as fp32."""
        return self.device.download(array)


Side = Cpu | Gpu
Run = Callable[[Side, Arrays], Arrays]


def rounded(host: Array, storage: np.dtype[Any]) -> Array:
    """Rounded to the storage type, as float32."""
    single = np.ascontiguousarray(host, np.float32)
    if storage == FLOAT:
        return single
    bits = single.view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(single), single, upper.view(np.float32))


def truncated(array: Array) -> Array:
    """To 10 bits of mantissa, towards zero: the worst that a tf32 product may do to a factor."""
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def on_gpu(device: "Device", host: Array, dtype: Any) -> Array:
    """A device array of this dtype (BF16: the rounded bits) with the host array's content."""
    host = np.asarray(host)
    array = device.allocate(host.size * np.dtype(dtype).itemsize).view(dtype)
    device.upload(array, host.reshape(-1))
    return array.reshape(host.shape)


def on_host(side: Side, arrays: Mapping[str, Array]) -> Arrays:
    """Host copies of what a run returned."""
    return {name: side.host(array) for name, array in arrays.items()}


def assert_calibrated_op(
    run: Run,
    arrays: Arrays,
    storage: np.dtype[Any],
    *,
    sums: Collection[str] = (),
    single: Collection[str] = (),
    exact: Collection[str] = (),
    scale: Mapping[str, float] | None = None,
    repeats: bool = True,
) -> None:
    """The GPU's error is at most twice the baseline's, tensor by tensor, and a second run gives the same
    bits.

    Args:
        run: as the file's docstring says.
        arrays: its inputs; floating-point ones in float64.
        storage: FLOAT or BF16.
        sums: outputs for which thrice is allowed and that are fp32 (column sums: the order of the terms
            differs).
        single: further outputs that are fp32 whatever the storage.
        exact: outputs that must be the oracle's, rounded; integers and booleans always are.
        scale: for an output whose terms cancel, the magnitude of the terms; else its own largest element
            stands for it.
        repeats: whether a second run has to give the same bits.
    """
    side = Gpu(storage)
    got, again = (on_host(side, run(side, arrays)) for _ in range(2))
    oracle, baseline = run(Cpu(np.float64, storage), arrays), run(Cpu(np.float32, storage), arrays)
    if repeats:
        assert_same_bits(again, got)
    assert got.keys() == oracle.keys()
    for name, expected in oracle.items():
        kind = FLOAT if name in single or name in sums else storage
        if name in exact or expected.dtype.kind in "biu":
            same = rounded(expected, kind) if expected.dtype.kind == "f" else expected
            assert np.array_equal(got[name], same), (
                f"{name}: {int((got[name] != same).sum())} of {same.size} elements differ"
            )
            continue
        largest = float(np.abs(expected).max())
        error = float(np.abs(baseline[name].astype(np.float64) - expected).max())
        floor = UNIT[kind] * largest + ROUNDINGS * UNIT[FLOAT] * (scale or {}).get(name, largest)
        allowed = max((3 if name in sums else 2) * error, floor)
        assert_within(f"{name} (baseline off by {error:.2e})", got[name], expected, allowed)
