"""The GPU that this process computes on: its stream, its loaded kernels, memory to and from the host, and captured graphs.

Everything runs on one stream, in order, so a scratch buffer of one operation may be the next one's.
"""

from collections.abc import Callable, Hashable
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver

from kernels.cuda.runtime.compile import compile_instance
from kernels.cuda.runtime.dependent_launch import launch_dependent
from kernels.cuda.runtime.launch import BF16, Array, Kernel, Template, arguments
from kernels.cuda.runtime.tensor_map import heads_map

# Oldest architecture with bf16 products and asynchronous copies.
OLDEST = (8, 0)


class Device:
    """One GPU.

    Raises:
        ValueError: there is no GPU, its driver is too old, or its architecture is not supported.
    """

    # Those of numerics: how products round, whose products and which attention are launched, and whether sums keep their order.
    precision: str
    matmul: str
    attention: str
    deterministic: bool
    measuring = False  # whether casts to FP8 take the scales of now

    asynchronous = True  # whether an operation goes on after the call that starts it

    def __init__(self) -> None:
        runtime = cupy.cuda.runtime
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise ValueError(
                f"runtime.device: there is no CUDA GPU with a driver for CUDA 13 ({error}); set it to cpu"
            ) from None
        if not count:
            raise ValueError("runtime.device: no CUDA GPU is visible; set it to cpu")
        self._device = cupy.cuda.Device()
        properties = runtime.getDeviceProperties(self._device.id)
        capability = properties["major"], properties["minor"]
        self.model = properties["name"].decode()
        if capability < OLDEST:
            raise ValueError(
                f"runtime.device: {self.model} is too old ({capability}, needed is {OLDEST}); set it to cpu"
            )
        self.arch, self._dependent_launches = f"sm_{capability[0]}{capability[1]}", capability >= (9, 0)
        self.processors = int(properties["multiProcessorCount"])
        self.shared_bytes = int(properties["sharedMemPerBlockOptin"])  # the most that a block may have
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._functions: dict[tuple[Kernel, Template], Any] = {}
        self._modules: list[Any] = []  # unloaded when collected
        self._graphs: dict[Hashable, Any] = {}
        self._workspace = np.empty(0, np.uint8)
        # Counts of blocks that have finished a part of something, or of parts that they took; zero between operations. More are
        # not split than fill the GPU.
        self.finished = self.allocate(4 * 4 * self.processors).view(np.int32)
        self._kept: dict[Hashable, Array] = {}

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
        """Start a kernel instance on the stream; arguments by the names that the .cu file gives them."""
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
        # One instance is launched with as much shared memory as the sizes at hand need, now less and then more.
        static_bytes = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr)
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(function.ptr, attribute, self.shared_bytes - static_bytes)
        self._modules.append(module)
        self._functions[kernel, template] = function
        return function

    def allocate(self, size: int) -> Array:
        """`size` zeroed bytes, at a multiple of 256."""
        try:
            with self.stream:
                memory = cupy.zeros(size, np.uint8)
        except cupy.cuda.memory.OutOfMemoryError:
            raise ValueError(
                f"memory: the GPU has no {size / 2**30:.1f} GiB left, {self.memory_bytes() / 2**30:.1f} are free; set a smaller "
                "micro_batch, or end what else runs on it"
            ) from None
        self.synchronize()
        return memory  # type: ignore[no-any-return]

    def allocate_shared(self, size: int) -> tuple[Array, Array]:
        """`size` zeroed bytes of the host's memory, as the host sees them and as kernels do, over the bus."""
        memory = cupy.cuda.alloc_pinned_memory(size)
        host = np.frombuffer(memory, np.uint8, size)
        host[...] = 0
        mapped = cupy.cuda.UnownedMemory(memory.ptr, size, memory, self._device.id)
        return host, cupy.ndarray(size, np.uint8, cupy.cuda.MemoryPointer(mapped, 0))

    def memory_bytes(self) -> int:
        """Free memory of the GPU."""
        return int(cupy.cuda.runtime.memGetInfo()[0])

    def used_bytes(self) -> int:
        """Memory of the GPU that is in use, by the driver's own meter: all of this process, and of any other."""
        free, total = cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    def use_workspace(self, workspace: Array) -> None:
        """Bytes that each operation may use while it runs."""
        self._workspace = workspace

    def workspace(self, *parts: tuple[tuple[int, ...], Any]) -> list[Array]:
        """Arrays of these shapes and dtypes, unwritten, good until the next operation."""
        views, offset = [], 0
        for shape, dtype in parts:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            assert offset + size <= self._workspace.size, (
                f"workspace: {offset + size} of {self._workspace.size} bytes"
            )
            views.append(self._workspace[offset : offset + size].view(dtype).reshape(shape))
            offset += -(-size // 256) * 256
        return views

    def kept(self, name: Hashable, size: int) -> Array:
        """`size` bytes that one operation alone writes, zero at first and from then on as it left them."""
        if (name, size) not in self._kept:
            self._kept[name, size] = self.allocate(size)
        return self._kept[name, size]

    def heads_map(self, array: Array) -> Array:
        """What a Hopper kernel takes for a (B, T, heads, D) array of bf16."""
        return heads_map(array)

    def upload(self, target: Any, source: Any) -> None:
        """Copy a host array, or a number, into a device array, rounded to bf16 where that is what the target holds."""
        host = np.asarray(source)
        if host.shape != target.shape:
            host = np.broadcast_to(host, target.shape)
        if target.dtype == BF16 and host.dtype != BF16:
            host = to_bf16(host)
        target.set(
            np.ascontiguousarray(host, target.dtype).reshape(target.shape), self.stream
        )  # 0-d arrays became 1-d

    def download(self, array: Any) -> Array:
        """A host copy of a device array, bf16 as fp32."""
        try:
            host = cupy.asnumpy(array, self.stream)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise _kernel_failed(error) from None
        self.synchronize()
        return from_bf16(host) if host.dtype == BF16 else host

    def fill_zero(self, array: Any) -> None:
        """Set every byte of a contiguous array to zero."""
        array.data.memset_async(0, array.nbytes, self.stream)

    def copy_rows(self, target: Any, source: Any, first: int, step: int) -> None:
        """target (n, C) = source (m, C)[first::step]; either may be shared with the host."""
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

    def replay(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do what `work` launches: by launching it at first, from a graph captured the second time on.

        `work` must launch the same kernels with the same arguments each time that it is called for one key.
        """
        graph = self._graphs.get(key)
        if graph is None and key in self._graphs:
            with self.stream:
                self.stream.begin_capture()
                work()
                graph = self._graphs[key] = self.stream.end_capture()
        if graph is None:
            work()
            self._graphs[key] = None
        else:
            graph.launch(self.stream)

    def forget(self, owner: int) -> None:
        """Drop the graphs whose key ends with the id of an object that is gone."""
        for key in [key for key in self._graphs if isinstance(key, tuple) and key[-1] == owner]:
            del self._graphs[key]

    def mark(self) -> Any:
        """The place in the stream that it has come to once all is done that was started so far."""
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event

    def synchronize(self, mark: Any = None) -> None:
        """Wait until the stream has come to a mark, or else is idle; an error of any kernel before comes up here."""
        try:
            (mark or self.stream).synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise _kernel_failed(error) from None


def _kernel_failed(error: Exception) -> ValueError:
    return ValueError(
        f"CUDA: a kernel failed: {error}; `compute-sanitizer python -m stages.NAME` says which and where"
    )


def to_bf16(host: Array) -> Array:
    """fp32 to the bits of bf16, to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(host, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(host), np.uint32(0x7FC0), rounded).astype(BF16)


def from_bf16(host: Array) -> Array:
    """The bits of bf16 to fp32."""
    return (host.astype(np.uint32) << np.uint32(16)).view(np.float32)
