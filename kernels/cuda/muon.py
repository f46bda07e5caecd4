"""Launchers of muon.cu and of the matmuls between its kernels. Contract: kernels/cpu/muon.py."""

import math

from kernels.config import ModelConfig
from kernels.cpu.muon import COEFFICIENTS, ITERATIONS, MOMENTUM, SCALE
from kernels.cuda.matmul.matmul import multiply
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Kernel, constants

_MOMENTUM = Kernel("muon.cu", "muon_momentum", ((),))
_BEGIN = Kernel("muon.cu", "muon_begin", ((FLOAT,), (BF16,)))
_POLYNOMIAL = Kernel("muon.cu", "muon_polynomial", ((FLOAT,), (BF16,)))
_APPLY = Kernel("muon.cu", "muon_apply", ((FLOAT,), (BF16,)))
_CONSTANTS = constants("muon.cu")
_BLOCK, _CHUNK = _CONSTANTS["BLOCK"], _CONSTANTS["CHUNK"]


def muon(
    device: Device,
    params: Array,
    exp_avg: Array,
    grads: Array,
    compute_weights: Array | None,
    x: Array,
    x_next: Array,
    gram: Array,
    poly: Array,
    grad_norm: Array,
    lr: Array,
    *,
    weight_decay: float,
    grad_clip: float,
) -> None:
    """See kernels/cpu/muon.py. Scratch arrays and compute weights hold T, the others fp32.

    Precision: momentum and parameters in fp32. x, gram and poly are rounded to T between the matmuls.
    Cost: ITERATIONS * (4 m n + 2 k^2) k operations per matrix, k = min(m, n). 23 launches with cuBLASLt. The
        custom matmul needs one launch per matrix.
    Scratch memory: 4 bytes per 4,096 elements.
    """
    layers, count, m, n = params.shape
    size, kind, flat = (
        m * n,
        (x.dtype,),
        [array for array in (params, exp_avg, grads, compute_weights) if array is not None],
    )
    (stride,) = {array.strides[0] // array.itemsize for array in flat}
    assert size + _CHUNK < 2**31, f"muon: a matrix of {size} elements"
    grid = (-(-size // _CHUNK), count, layers)
    (partial,) = device.workspace((grid, FLOAT))
    layout = {"grad_norm": grad_norm, "size": size, "stride": stride}
    gradient = {
        "exp_avg": exp_avg[0],
        "grads": grads[0],
        "partial": partial,
        "momentum": MOMENTUM,
        "grad_clip": grad_clip,
    }
    device.launch(_MOMENTUM, (), grid, _BLOCK, **gradient, **layout)
    device.launch(_BEGIN, kind, grid, _BLOCK, x=x, **gradient, **layout)
    for _ in range(ITERATIONS):
        iterate(device, x_next, gram, poly, x)
        x, x_next = x_next, x
    copy = None if compute_weights is None else compute_weights[0]
    device.launch(
        _APPLY, kind, grid, _BLOCK, params=params[0], compute_weights=copy, x=x, lr=lr,
        scale=SCALE * math.sqrt(max(m, n)), weight_decay=weight_decay, **layout,
    )  # fmt: skip


def iterate(device: Device, out: Array, gram: Array, poly: Array, x: Array) -> None:
    """See kernels/cpu/muon.py. x holds all matrices, (matrices, m, n)."""
    (matrices, m, n), side = x.shape, gram.shape[1]
    multiply(device, gram, x, x, transpose_a=m > n, transpose_b=m <= n)
    multiply(device, poly, gram, gram)
    a, b, c = COEFFICIENTS
    device.launch(
        _POLYNOMIAL, (x.dtype,), (side, matrices), _BLOCK, poly=poly, gram=gram, side=side, a=a, b=b, c=c
    )
    multiply(device, out, *((x, poly) if m > n else (poly, x)))


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """A partial sum per chunk of every matrix. q, k, v, gate and up are separate matrices."""
    matrices = config.layers * sum(-(-m * n // _CHUNK) + 2 for m, n in config.linears.values())
    return FLOAT.itemsize * matrices
