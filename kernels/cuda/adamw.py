"""Launcher of adamw.cu. Mathematics and contract: kernels/cpu/adamw.py."""

from typing import Any

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Kernel, constants
from kernels.parameters import DECAYS, GROUP_SHIFT, GROUPS, MUON, ZERO_GRAD

_ADAMW = Kernel("adamw.cu", "adamw", ((FLOAT, 1), (FLOAT, 4), (BF16, 1), (BF16, 4)))
_BLOCK, _BLOCKS_PER_SM = 256, 8  # not tuned
_FLAGS = constants("adamw.cu")
_OURS = {
    "DECAYS": DECAYS,
    "ZERO_GRAD": ZERO_GRAD,
    "MUON": MUON,
    "GROUP_SHIFT": GROUP_SHIFT,
    "GROUPS": len(GROUPS),
}
assert {name: _FLAGS[name] for name in _OURS} == _OURS


def adamw(
    device: Device,
    params: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    grads: Array,
    compute_weights: Array | None,
    flags: Array,
    grad_norm: Array,
    lr: Array,
    step: Array,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_clip: float,
    lr_scales: tuple[float, ...],
) -> None:
    """See kernels/cpu/adamw.py. compute_weights is fp32 or bf16, the other flat arrays are fp32.

    Precision: bias corrections and clipping factor in fp64, rounded once; elements in fp32.
    Cost per parameter: reads 16 bytes. Writes 12 bytes, 16 if it clears the gradient, and the compute weight.
    """
    scales: dict[str, Any] = {f"{name}_scale": scale for name, scale in zip(GROUPS, lr_scales, strict=True)}
    segment = params.size // flags.size
    size = 1 if segment % 4 else 4
    vectors = params.size // size
    assert vectors < 2**31, f"adamw: {params.size} parameters"
    device.launch(
        _ADAMW, (FLOAT if compute_weights is None else compute_weights.dtype, size),
        min(-(-vectors // _BLOCK), _BLOCKS_PER_SM * device.sm_count), _BLOCK,
        params=params, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grads=grads, compute_weights=compute_weights,
        flags=flags, grad_norm=grad_norm, lr=lr, step=step, vectors=vectors, segment_vectors=segment // size,
        beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, grad_clip=grad_clip,
        **scales,
    )  # fmt: skip
