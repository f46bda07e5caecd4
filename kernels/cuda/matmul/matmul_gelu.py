"""A linear layer and the GELU beside it; the mathematics and the contracts are those of kernels.cpu.matmul_gelu.

In bf16 GELU is computed where the product's sums are at hand, which spares a pass over (rows, F) each way: on Hopper by our own
kernel, whatever `device.matmul` says, which also sums dup for the bias; elsewhere by cuBLASLt.
"""

from typing import Any

from kernels.cuda.bias import bias_backward
from kernels.cuda.gelu import gelu_backward, gelu_forward
from kernels.cuda.matmul import cublaslt, linear_rows
from kernels.cuda.matmul.matmul import matmul_backward, matmul_forward, weight_gradient
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Kernel
from kernels.cuda.runtime.vectors import vector_size
from kernels.cuda.sum_rows import add_rows

_SIZE = 8  # elements that the library's rows are multiples of here
# TILE_N. The wider tile loads fewer bytes per FLOP; the narrower one takes every n.
_TILE_N = (192, 128)
_INSTANCES = tuple((backward, tile_n) for backward in (False, True) for tile_n in _TILE_N)
_HOPPER = Kernel("matmul/matmul_gelu_hopper.cu", "matmul_gelu", _INSTANCES, hopper=True)
# The kernel's TILE_M, BOX, threads, CLUSTER, warps per warpgroup. Shared memory: 28 boxes (stages and
# epilogue buffers) and mbarriers.
_TILE_M, _BOX, _BLOCK, _CLUSTER, _WARPS = 128, 64, 3 * 128, 2, 4
_SHARED_BYTES = 28 * _BOX * _BOX * BF16.itemsize + 192


def matmul_gelu_forward(device: Device, act: Any, up: Any, inp: Any, weight: Any, bias: Any = None) -> None:
    """See kernels.cpu.matmul_gelu.matmul_gelu_forward.

    In bf16 both results are made of the fp32 sum: act is GELU's of up before it was rounded.
    """
    few = len(inp) <= linear_rows.MOST_ROWS
    if not few and _by_hopper(device, up, inp):
        _launch(device, False, up, act, inp, weight, bias, None)
    elif not few and _gelu_in_product(device, act, up, bias):
        epilogue = "gelu" if bias is None else "bias gelu"
        cublaslt.multiply(device, act, inp, weight, False, True, False, device.precision, epilogue, bias, up)
    else:
        matmul_forward(device, up, inp, weight, bias)
        gelu_forward(device, act, up)


def matmul_gelu_backward(
    device: Device, dup: Any, dweight: Any, dout: Any, act: Any, up: Any, weight: Any, dbias: Any = None, *,
    add_dweight: bool = True,
) -> None:  # fmt: skip
    """See kernels.cpu.matmul_gelu.matmul_gelu_backward. dweight and dbias are fp32, all else T; in bf16 dup is rounded once.

    Workspace: on Hopper a row of fp32 for each 32 rows.
    """
    if _by_hopper(device, up, dout):
        weight_gradient(device, dweight, dout, act, add_dweight)
        (partial,) = device.workspace(((1, _WARPS * -(-len(up) // _TILE_M), up.shape[1]), FLOAT))
        _launch(device, True, up, dup, dout, weight, None, partial)
        if dbias is not None:
            add_rows(device, partial, dbias)
        return
    if _gelu_in_product(device, dup, up, None):
        weight_gradient(device, dweight, dout, act, add_dweight)
        cublaslt.multiply(
            device, dup, dout, weight, False, False, False, device.precision, "gelu backward", None, up
        )
    else:
        matmul_backward(device, dup, dweight, dout, act, weight, add_dweight=add_dweight)
        gelu_backward(device, dup, dup, up)
    if dbias is not None:
        bias_backward(device, dbias, dup)


def _gelu_in_product(device: Device, out: Any, up: Any, bias: Any) -> bool:
    """Whether the library computes GELU with the product: only in bf16, as its tanh is an approximation."""
    given = (out, up) if bias is None else (out, up, bias)
    return device.matmul == "cublaslt" and out.dtype == BF16 and vector_size(out.shape[1], *given) == _SIZE


def _by_hopper(device: Device, up: Any, inp: Any) -> bool:
    """Whether matmul_gelu_hopper.cu takes them: n and k are multiples of a TMA box."""
    whole = up.shape[1] % _BOX == 0 and inp.shape[1] % _BOX == 0
    return device.arch == "sm_90" and up.dtype == BF16 and whole


def _launch(
    device: Device, backward: bool, up: Any, out: Any, inp: Any, weight: Any, bias: Any, partial: Any
) -> None:
    """Clusters of two blocks; no more than there are pairs of tiles."""
    (m, n), k = up.shape, inp.shape[1]
    tile_n = next((width for width in _TILE_N if n % width == 0), _TILE_N[-1])
    pairs = -(-m // _TILE_M) * -(-n // (_CLUSTER * tile_n))
    maps = {f"{name}_map": device.heads_map(x.reshape(1, len(x), 1, -1)) for name, x in
            (("up", up), ("out", out), ("a", inp), ("b", weight))}  # fmt: skip
    device.launch(
        _HOPPER, (backward, tile_n), _CLUSTER * min(pairs, device.processors // _CLUSTER), _BLOCK, shared_bytes=_SHARED_BYTES,
        bias=bias, partial=partial, m=m, n=n, k=k, **maps,
    )  # fmt: skip
