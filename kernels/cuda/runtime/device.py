"""The GPU of this process: its stream, its loaded kernels, copies to and from the host, and CUDA graphs.

Everything runs on one stream, in order, so operations can share one scratch buffer.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver

from kernels.cuda.runtime.compile import compile_instance
from kernels.cuda.runtime.dependent_launch import launch_dependent
from kernels.cuda.runtime.launch import BF16, Array, Kernel, Template, arguments
from kernels.cuda.runtime.tensor_map import heads_map
from kernels.ops import Fp8Ops, Graphs

# The oldest architecture with bf16 matmuls and asynchronous copies.
MIN_CAPABILITY = (8, 0)


# Shape and dtype of an array in scratch memory.
Request = tuple[tuple[int, ...], Any]
_SCRATCH_ALIGNMENT = 256


def request_bytes(*requests: Request) -> int:
    """The scratch memory for these arrays together."""
    sizes = (math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in requests)
    return sum(-(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT for size in sizes)


class Device:
    """One GPU.

    Args:
        index: of the GPU among those that this process sees, modulo their number: some launchers show a
            process all GPUs of the machine, others only its own.

    Raises:
        ValueError: there is no GPU, its driver is too old, or its architecture is not supported.
    """

    # From numerics: rounding of matmuls, kernels for matmuls and attention, and whether sums have a fixed
    # order.
    precision: str
    storage: np.dtype[Any]
    fp8: Fp8Ops | None = None
    matmul: str
    attention: str
    deterministic: bool
    current_scaling = False  # whether FP8 casts use the array's own amax, not that of the previous update

    asynchronous = True

    def __init__(self, index: int = 0) -> None:
        runtime = cupy.cuda.runtime
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise ValueError(
                f"runtime.device: there is no CUDA GPU with a driver for CUDA 13 ({error}); set it to cpu"
            ) from None
        if not count:
            raise ValueError("runtime.device: no CUDA GPU is visible; set it to cpu")
        self._device = cupy.cuda.Device(index % count)
        self._device.use()
        properties = runtime.getDeviceProperties(self._device.id)
        capability = properties["major"], properties["minor"]
        self.model = properties["name"].decode()
        if capability < MIN_CAPABILITY:
            raise ValueError(
                f"runtime.device: {self.model} is too old ({capability}, needed is {MIN_CAPABILITY}); "
                "set it to cpu"
            )
        self.arch, self._dependent_launches = f"sm_{capability[0]}{capability[1]}", capability >= (9, 0)
        self.sm_count = int(properties["multiProcessorCount"])
        self.shared_bytes = int(properties["sharedMemPerBlockOptin"])  # maximum per block
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._functions: dict[tuple[Kernel, Template], Any] = {}
        self._modules: list[Any] = []  # unloaded when collected
        self._workspace = np.empty(0, np.uint8)
        # Counters that kernels share: of finished blocks, or of assigned work items. Zero between operations.
        # No operation splits work among more blocks than the GPU holds at once.
        self.block_counters = self.allocate(4 * 4 * self.sm_count).view(np.int32)
        self._persistent: dict[Hashable, Array] = {}

    def launch(
        self,
        kernel: Kernel,
        template: Template,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *,
        shared_bytes: int = 0,
        **given: Any,
    ) -> None:
        """Launch a kernel instance on the stream. `given`: its arguments, by their names in the .cu file."""
        function = self._functions.get((kernel, template)) or self._load(kernel, template)
        grid, block = (x if isinstance(x, tuple) else (x,) for x in (grid, block))
        ordered = arguments(kernel, template, given)
        if kernel.dependent_launch and self._dependent_launches:
            launch_dependent(function.ptr, grid, block, ordered, shared_bytes, self.stream.ptr)
        else:
            function(grid, block, ordered, shared_bytes, self.stream)

    def _load(self, kernel: Kernel, template: Template) -> Any:
        arch = f"{self.arch}a" if kernel.hopper else self.arch
        compiled = compile_instance(kernel.source, kernel.expression(template), arch)
        module = cupy.cuda.function.Module()
        module.load(compiled.cubin)
        function = module.get_function(compiled.symbol)
        # An instance may be launched with different sizes of shared memory. So allow the maximum.
        static_bytes = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr)
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(function.ptr, attribute, self.shared_bytes - static_bytes)
        self._modules.append(module)
        self._functions[kernel, template] = function
        return function

    def allocate(self, size: int) -> Array:
        """`size` zeroed bytes, aligned to 256 bytes."""
        try:
            with self.stream:
                memory = cupy.zeros(size, np.uint8)
        except cupy.cuda.memory.OutOfMemoryError:
            raise ValueError(
                f"memory: the GPU has no {size / 2**30:.1f} GiB left, {self.memory_bytes() / 2**30:.1f} are "
                "free; set a smaller micro_batch, or end other programs on it"
            ) from None
        self.synchronize()
        return memory  # type: ignore[no-any-return]

    def allocate_shared(self, size: int) -> tuple[Array, Array]:
        """`size` zeroed bytes of pinned host memory: the host's view, and the kernels' view over the bus."""
        memory = cupy.cuda.alloc_pinned_memory(size)
        host = np.frombuffer(memory, np.uint8, size)
        host[...] = 0
        mapped = cupy.cuda.UnownedMemory(memory.ptr, size, memory, self._device.id)
        return host, cupy.ndarray(size, np.uint8, cupy.cuda.MemoryPointer(mapped, 0))

    def memory_bytes(self) -> int:
        """Free memory of the GPU."""
        return int(cupy.cuda.runtime.memGetInfo()[0])

    def used_bytes(self) -> int:
        """Memory in use on the GPU by all processes, as the driver reports it."""
        free, total = cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    def use_workspace(self, workspace: Array) -> None:
        """Set the scratch memory. Each operation may use it while it runs."""
        self._workspace = workspace

    def workspace(self, *requests: Request) -> list[Array]:
        """Uninitialized arrays in scratch memory, valid until the next operation."""
        views, offset = [], 0
        for shape, dtype in requests:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            assert offset + size <= self._workspace.size, (
                f"workspace: {offset + size} of {self._workspace.size} bytes"
            )
            views.append(self._workspace[offset : offset + size].view(dtype).reshape(shape))
            offset += -(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        return views

    def persistent_buffer(self, name: Hashable, size: int) -> Array:
        """`size` bytes that one operation owns. They start as zero and keep their values between calls."""
        if (name, size) not in self._persistent:
            self._persistent[name, size] = self.allocate(size)
        return self._persistent[name, size]

    def heads_map(self, array: Array) -> Array:
        """See kernels/cuda/runtime/tensor_map.py."""
        return heads_map(array)

    def upload(self, target: Any, source: Any) -> None:
        """Copy a host array or a number to a device array. It is rounded to bf16 if the target is bf16."""
        host = np.asarray(source)
        if host.shape != target.shape:
            host = np.broadcast_to(host, target.shape)
        if target.dtype == BF16 and host.dtype != BF16:
            host = to_bf16(host)
        # ascontiguousarray makes 0-d arrays 1-d.
        target.set(np.ascontiguousarray(host, target.dtype).reshape(target.shape), self.stream)

    def download(self, array: Any) -> Array:
        """A host copy of a device array. bf16 becomes fp32."""
        try:
            host = cupy.asnumpy(array, self.stream)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise _kernel_failed(error) from None
        self.synchronize()
        return from_bf16(host) if host.dtype == BF16 else host

    def fill_zero(self, array: Any) -> None:
        """Set every byte of a contiguous array to zero."""
        array.data.memset_async(0, array.nbytes, self.stream)

    def copy(self, target: Any, source: Any) -> None:
        """target = source, two contiguous arrays of the GPU."""
        target.data.copy_from_device_async(source.data, source.nbytes, self.stream)

    def layers_view(self, flat: Any, offset: int, shape: tuple[int, ...], stride: int) -> Array:
        """See kernels/ops.py."""
        size = flat.itemsize
        within = [size * math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))]
        return cupy.ndarray(shape, flat.dtype, flat.data + offset * size, (stride * size, *within))

    def copy_rows(self, target: Any, source: Any, first: int, step: int) -> None:
        """target (n, C) = source (m, C)[first::step]. Either may be shared with the host."""
        width = source.shape[1] * source.dtype.itemsize
        origin, from_anywhere = source.data.ptr + first * width, cupy.cuda.runtime.memcpyDefault
        cupy.cuda.runtime.memcpy2DAsync(
            target.data.ptr,
            width,
            origin,
            step * width,
            width,
            target.shape[0],
            from_anywhere,
            self.stream.ptr,
        )

    def new_graphs(self) -> Graphs:
        """Captured graphs by key. None: the work ran once, and the next call captures it."""
        return dict[Hashable, Any]()

    def replay(self, graphs: Graphs, key: Hashable, work: Callable[[], None]) -> None:
        """See kernels/ops.py. The first call runs the work, because it may still load kernels."""
        graph = graphs.get(key)
        if graph is None and key in graphs:
            with self.stream:
                self.stream.begin_capture()
                work()
                graph = graphs[key] = self.stream.end_capture()
        if graph is None:
            work()
            graphs[key] = None
        else:
            graph.launch(self.stream)

    def record_event(self) -> Any:
        """An event that completes when all work launched so far is done."""
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event

    def synchronize(self, event: Any = None) -> None:
        """Wait for an event, or until the stream is idle. It raises the error of an earlier kernel."""
        try:
            (event or self.stream).synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise _kernel_failed(error) from None


def _kernel_failed(error: Exception) -> ValueError:
    return ValueError(
        f"CUDA: a kernel failed: {error}; `compute-sanitizer python -m stages.NAME` says which and where"
    )


def to_bf16(host: Array) -> Array:
    """fp32 to the bits of bf16, rounded to nearest even. NaN stays NaN."""
    bits = np.ascontiguousarray(host, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(host), np.uint32(0x7FC0), rounded).astype(BF16)


def from_bf16(host: Array) -> Array:
    """The bits of bf16 to fp32."""
    return (host.astype(np.uint32) << np.uint32(16)).view(np.float32)
