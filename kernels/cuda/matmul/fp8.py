"""Launchers of fp8.cu; the contracts are those of kernels.cpu.fp8."""

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import Array, Kernel
from kernels.fp8 import MULTIPLE

_SCALE = Kernel("matmul/fp8.cu", "fp8_scale", ((),))
_RESCALE = Kernel("matmul/fp8.cu", "fp8_rescale", ((),))
_IDENTITY, _GELU, _GELU_BACKWARD = range(3)
_CAST = Kernel("matmul/fp8.cu", "fp8_cast", ((_IDENTITY,), (_GELU,), (_GELU_BACKWARD,)))
# The kernels' threads, SIZE, LOADS_IN_FLIGHT, and tile.
_SCALE_BLOCK, _SIZE, _LOADS_IN_FLIGHT = 512, 8, 4
_CAST_BLOCK, ROWS, _COLUMNS = 256, 128, 64
_RESCALE_BLOCK = 128
_BLOCKS_A_PROCESSOR = 4  # of _SCALE: as many threads as a Hopper GPU's holds


def fp8(
    device: Device,
    out: Array,
    transposed: Array,
    scale: Array,
    most: Array | None,
    inp: Array,
    *,
    measure: bool,
) -> None:
    """See kernels.cpu.fp8.fp8; inp is bf16, and its columns and transposed's are multiples of 16.

    Cost: reads inp once, twice where it measures; writes two bytes an element.
    """
    if measure:
        vectors = inp.size // _SIZE
        blocks = min(-(-vectors // (_SCALE_BLOCK * _LOADS_IN_FLIGHT)), _BLOCKS_A_PROCESSOR * device.processors)
        device.launch(
            _SCALE,
            (),
            blocks,
            _SCALE_BLOCK,
            scale=scale,
            inp=inp,
            grid_state=device.finished[:2],
            vectors=vectors,
        )
    _cast(device, _IDENTITY, out, transposed, scale, most, inp)


def fp8_gelu_forward(
    device: Device, out: Array, transposed: Array, scale: Array, most: Array, up: Array
) -> None:
    """fp8, not measured, of what gelu_forward makes of up."""
    _cast(device, _GELU, out, transposed, scale, most, up)


def fp8_gelu_backward(
    device: Device,
    out: Array,
    transposed: Array,
    scale: Array,
    most: Array,
    partial: Array,
    dout: Array,
    up: Array,
) -> None:
    """fp8, unmeasured, of what gelu_backward makes of dout and up, and its sums over ROWS rows each: partial (1, n, F)."""
    _cast(device, _GELU_BACKWARD, out, transposed, scale, most, dout, partial, up)


def _cast(
    device: Device, of: int, out: Array, transposed: Array, scale: Array, most: Array | None, inp: Array,
    partial: Array | None = None, up: Array | None = None,
) -> None:  # fmt: skip
    (rows, columns), pitch = inp.shape, transposed.shape[1]
    assert columns % MULTIPLE == pitch % MULTIPLE == 0, f"fp8: {columns} columns, {pitch} transposed"
    grid = -(-columns // _COLUMNS), -(-max(rows, pitch) // ROWS)
    device.launch(
        _CAST, (of,), grid, _CAST_BLOCK,
        out=out, transposed=transposed, scale=scale, amax=most, partial=partial, inp=inp, up=up,
        rows=rows, columns=columns, pitch=pitch,
    )  # fmt: skip


def fp8_rescale(device: Device, scales: Array, most: Array, norm: Array) -> None:
    """See kernels.cpu.fp8.fp8_rescale."""
    blocks = -(-most.size // _RESCALE_BLOCK)
    device.launch(_RESCALE, (), blocks, _RESCALE_BLOCK, scales=scales, amax=most, norm=norm, count=most.size)
