"""A linear layer fused with GELU. Mathematics and contracts: kernels/cpu/matmul_gelu.py.

In bf16, GELU is computed from the matmul's fp32 accumulators. That saves a pass over (rows, F), forward and
backward. On Hopper GPUs our own kernel does it, with either backend. It also sums dup for the bias. On other
GPUs cuBLASLt does it.
"""

from typing import Any

from kernels.config import ModelConfig
from kernels.cuda.bias import bias_backward
from kernels.cuda.gelu import gelu_backward, gelu_forward
from kernels.cuda.matmul import cublaslt, linear_rows
from kernels.cuda.matmul.matmul import matmul_backward, matmul_forward, weight_gradient
from kernels.cuda.runtime.device import Device, Request, request_bytes
from kernels.cuda.runtime.launch import BF16, FLOAT, Kernel, constants
from kernels.cuda.runtime.vectors import vector_size
from kernels.cuda.sum_rows import add_rows

_SIZE = 8  # cuBLASLt's GELU epilogues need rows that are a multiple of 8 elements
_TILE_N = (192, 128)  # 192 loads fewer bytes per multiply-add, 128 divides every other width
_INSTANCES = tuple((backward, tile_n) for backward in (False, True) for tile_n in _TILE_N)
_HOPPER = Kernel("matmul/matmul_gelu_hopper.cu", "matmul_gelu", _INSTANCES, hopper=True)
_CONSTANTS = constants("matmul/matmul_gelu_hopper.cu", TILE_N=_TILE_N[0])
_TILE_M, _BOX, _CLUSTER = (_CONSTANTS[name] for name in ("TILE_M", "BOX", "CLUSTER"))
_BLOCK = 3 * _CONSTANTS["WARPGROUP"]
_WARPS = _CONSTANTS["WARPGROUP"] // _CONSTANTS["WARP"]
_MBARRIER_BYTES = 192  # more than enough
# The same for both tile widths: a narrower tile has more stages.
_SHARED_BYTES = (
    _CONSTANTS["STAGES"] * _CONSTANTS["STAGE_BYTES"]
    + _CONSTANTS["CONSUMERS"] * _CONSTANTS["EPILOGUE_BUFFERS"] * _CONSTANTS["BOX_BYTES"]
    + _MBARRIER_BYTES
)


def matmul_gelu_forward(device: Device, act: Any, up: Any, inp: Any, weight: Any, bias: Any = None) -> None:
    """See kernels/cpu/matmul_gelu.py.

    In bf16 both results come from the fp32 accumulators: act is not GELU of the rounded up.
    """
    few = len(inp) <= linear_rows.MAX_ROWS
    if not few and _takes_hopper(device, up, inp):
        _launch_hopper(device, up, act, inp, weight, bias=bias)
    elif not few and _gelu_in_epilogue(device, act, up, bias):
        epilogue = "gelu" if bias is None else "bias gelu"
        cublaslt.multiply(
            device, act, inp, weight, precision=device.precision, transpose_b=True, epilogue=epilogue,
            bias=bias, aux=up,
        )  # fmt: skip
    else:
        matmul_forward(device, up, inp, weight, bias)
        gelu_forward(device, act, up)


def matmul_gelu_backward(
    device: Device, dup: Any, dweight: Any, dout: Any, act: Any, up: Any, weight: Any, dbias: Any = None, *,
    add_dweight: bool = True,
) -> None:  # fmt: skip
    """See kernels/cpu/matmul_gelu.py. dweight and dbias are fp32, the rest T. In bf16 dup is rounded once."""
    if _takes_hopper(device, up, dout):
        weight_gradient(device, dweight, dout, act, accumulate=add_dweight)
        (partial,) = device.workspace(_scratch(*up.shape))
        _launch_hopper(device, up, dup, dout, weight, partial=partial)
        if dbias is not None:
            add_rows(device, partial, dbias)
        return
    if _gelu_in_epilogue(device, dup, up, None):
        weight_gradient(device, dweight, dout, act, accumulate=add_dweight)
        cublaslt.multiply(
            device, dup, dout, weight, precision=device.precision, epilogue="gelu backward", aux=up
        )
    else:
        matmul_backward(device, dup, dweight, dout, act, weight, add_dweight=add_dweight)
        gelu_backward(device, dup, dup, up)
    if dbias is not None:
        bias_backward(device, dbias, dup)


def _gelu_in_epilogue(device: Device, out: Any, up: Any, bias: Any) -> bool:
    """Whether cuBLASLt computes GELU in its epilogue: only in bf16, because its tanh is an approximation."""
    given = (out, up) if bias is None else (out, up, bias)
    return device.matmul == "cublaslt" and out.dtype == BF16 and vector_size(out.shape[1], *given) == _SIZE


def _takes_hopper(device: Device, up: Any, inp: Any) -> bool:
    """Whether matmul_gelu_hopper.cu supports these arrays: the widths must be whole TMA boxes."""
    whole = up.shape[1] % _BOX == 0 and inp.shape[1] % _BOX == 0
    return device.arch == "sm_90" and up.dtype == BF16 and whole


def _launch_hopper(
    device: Device, up: Any, out: Any, inp: Any, weight: Any, *, bias: Any = None, partial: Any = None
) -> None:
    """Forward: writes up and out = act. Backward: writes out = dup and its sums, from inp = dout.

    It is the backward pass if `partial` is given.
    """
    (m, n), k, backward = up.shape, inp.shape[1], partial is not None
    tile_n = next((tile_n for tile_n in _TILE_N if n % tile_n == 0), _TILE_N[-1])
    # Persistent clusters of two blocks, at most one per pair of tiles.
    pairs = -(-m // _TILE_M) * -(-n // (_CLUSTER * tile_n))
    arrays = {"up_map": up, "out_map": out, "a_map": inp, "b_map": weight}
    maps = {name: device.heads_map(array.reshape(1, len(array), 1, -1)) for name, array in arrays.items()}
    device.launch(
        _HOPPER, (backward, tile_n), _CLUSTER * min(pairs, device.sm_count // _CLUSTER), _BLOCK,
        shared_bytes=_SHARED_BYTES, bias=bias, partial=partial, m=m, n=n, k=k, **maps,
    )  # fmt: skip


def _scratch(rows: int, columns: int) -> Request:
    """One row of partial sums per warp, for the gradient of the bias."""
    return (1, _WARPS * -(-rows // _TILE_M), columns), FLOAT


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """Scratch memory of the Hopper kernel."""
    return request_bytes(_scratch(rows, config.ffn))
