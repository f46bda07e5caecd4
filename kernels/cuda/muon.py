"""Launchers of muon.cu and of the products between its kernels; mathematics and contract are those of kernels.cpu.muon."""

import math

from kernels.cpu.muon import COEFFICIENTS, ITERATIONS, MOMENTUM, SCALE
from kernels.cuda.device import Device
from kernels.cuda.launch import BF16, FLOAT, Array, Kernel
from kernels.cuda.matmul import input_gradient, matmul_forward, weight_gradient

_MOMENTUM = Kernel("muon.cu", "muon_momentum", ((),))
_BEGIN = Kernel("muon.cu", "muon_begin", ((FLOAT,), (BF16,)))
_POLYNOMIAL = Kernel("muon.cu", "muon_polynomial", ((FLOAT,), (BF16,)))
_APPLY = Kernel("muon.cu", "muon_apply", ((FLOAT,), (BF16,)))
_BLOCK, _CHUNK = 256, 4096  # those of muon.cu


def muon(
    device: Device,
    params: Array,
    exp_avg: Array,
    grads: Array,
    copy: Array | None,
    x: Array,
    spare: Array,
    gram: Array,
    square: Array,
    grad_norm: Array,
    lr: Array,
    *,
    weight_decay: float,
    grad_clip: float,
) -> None:
    """See kernels.cpu.muon.muon; the scratch and the copy are of T, the others fp32.

    Precision: momentum and parameters in fp32; x, gram and square are rounded to T, their products are those of the op matmul.
    Cost: ITERATIONS * (4 * m * n + 2 * k^2) * k operations, k = min(m, n); workspace of 4 bytes a 4,096 elements.
    """
    size, kind = params.size, (x.dtype,)
    assert size + _CHUNK < 2**31, f"muon: a matrix of {size} elements"
    chunks = -(-size // _CHUNK)
    (partial,) = device.workspace(((chunks,), FLOAT))
    device.launch(
        _MOMENTUM, (), chunks, _BLOCK,
        exp_avg=exp_avg, partial=partial, grads=grads, grad_norm=grad_norm, size=size, momentum=MOMENTUM, grad_clip=grad_clip,
    )  # fmt: skip
    device.launch(
        _BEGIN, kind, chunks, _BLOCK, x=x, exp_avg=exp_avg, grads=grads, partial=partial, grad_norm=grad_norm, size=size,
        chunks=chunks, momentum=MOMENTUM, grad_clip=grad_clip,
    )  # fmt: skip
    for _ in range(ITERATIONS):
        iterate(device, spare, gram, square, x)
        x, spare = spare, x
    device.launch(
        _APPLY, kind, chunks, _BLOCK, params=params, copy=copy, x=x, grad_norm=grad_norm, lr=lr, size=size,
        scale=SCALE * math.sqrt(max(params.shape)), weight_decay=weight_decay,
    )  # fmt: skip


def iterate(device: Device, out: Array, gram: Array, square: Array, x: Array) -> None:
    """See kernels.cpu.muon.iterate."""
    tall, side = x.shape[0] > x.shape[1], len(gram)
    if tall:
        weight_gradient(device, gram, x, x, add=False)
    else:
        matmul_forward(device, gram, x, x)
    input_gradient(device, square, gram, gram, add=False)
    a, b, c = COEFFICIENTS
    device.launch(_POLYNOMIAL, (x.dtype,), side, _BLOCK, square=square, gram=gram, side=side, a=a, b=b, c=c)
    left, right = (x, square) if tall else (square, x)
    input_gradient(device, out, left, right, add=False)
