"""Launchers of fp8.cu. Contracts: kernels/cpu/fp8.py."""

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import Array, Kernel, constants
from kernels.fp8 import MULTIPLE

_SCALE = Kernel("matmul/fp8.cu", "fp8_scale", ((),))
_RESCALE = Kernel("matmul/fp8.cu", "fp8_rescale", ((),))
_IDENTITY, _GELU, _GELU_BACKWARD = range(3)
_CAST = Kernel("matmul/fp8.cu", "fp8_cast", ((_IDENTITY,), (_GELU,), (_GELU_BACKWARD,)))
_CONSTANTS = constants("matmul/fp8.cu")
_SCALE_BLOCK, _CAST_BLOCK, _SIZE, _LOADS_IN_FLIGHT, _COLUMNS, ROWS = (
    _CONSTANTS[name] for name in ("SCALE_BLOCK", "CAST_BLOCK", "SIZE", "LOADS_IN_FLIGHT", "COLUMNS", "ROWS")
)
_RESCALE_BLOCK = 128
_BLOCKS_PER_SM = 4  # of _SCALE: they fill an SM of a Hopper GPU


def fp8(
    device: Device,
    out: Array,
    transposed: Array,
    scale: Array,
    amax: Array | None,
    inp: Array,
    *,
    measure: bool,
) -> None:
    """See kernels/cpu/fp8.py. inp is bf16. Its columns and those of transposed are multiples of 16.

    Cost: reads inp once, or twice if it measures the amax. Writes two bytes per element.
    """
    if measure:
        vectors = inp.size // _SIZE
        blocks = min(-(-vectors // (_SCALE_BLOCK * _LOADS_IN_FLIGHT)), _BLOCKS_PER_SM * device.sm_count)
        device.launch(
            _SCALE,
            (),
            blocks,
            _SCALE_BLOCK,
            scale=scale,
            inp=inp,
            grid_state=device.block_counters[:2],
            vectors=vectors,
        )
    _cast(device, _IDENTITY, out, transposed, scale, amax, inp)


def fp8_gelu_forward(
    device: Device, out: Array, transposed: Array, scale: Array, amax: Array, up: Array
) -> None:
    """The FP8 casts of GELU(up). The scale is given, not measured."""
    _cast(device, _GELU, out, transposed, scale, amax, up)


def fp8_gelu_backward(
    device: Device,
    out: Array,
    transposed: Array,
    scale: Array,
    amax: Array,
    partial: Array,
    dout: Array,
    up: Array,
) -> None:
    """The FP8 casts of the gradient of up. The scale is given, not measured.

    partial (1, n, F) gets the gradient's sums over ROWS rows each.
    """
    _cast(device, _GELU_BACKWARD, out, transposed, scale, amax, dout, partial, up)


def _cast(
    device: Device, function: int, out: Array, transposed: Array, scale: Array, amax: Array | None,
    inp: Array, partial: Array | None = None, up: Array | None = None,
) -> None:  # fmt: skip
    (rows, columns), pitch = inp.shape, transposed.shape[1]
    assert columns % MULTIPLE == pitch % MULTIPLE == 0, f"fp8: {columns} columns, {pitch} transposed"
    grid = -(-columns // _COLUMNS), -(-max(rows, pitch) // ROWS)
    device.launch(
        _CAST, (function,), grid, _CAST_BLOCK,
        out=out, transposed=transposed, scale=scale, amax=amax, partial=partial, inp=inp, up=up,
        rows=rows, columns=columns, pitch=pitch,
    )  # fmt: skip


def fp8_rescale(device: Device, scales: Array, amax: Array, grad_norm: Array) -> None:
    """See kernels/cpu/fp8.py."""
    blocks = -(-amax.size // _RESCALE_BLOCK)
    device.launch(
        _RESCALE, (), blocks, _RESCALE_BLOCK, scales=scales, amax=amax, grad_norm=grad_norm, count=amax.size
    )
