"""The parts of which a model is a choice. An entry holds everything that the model knows of a part.

An entry names its parameters and buffers, and writes its forward and backward pass over the device's
operations. Decoding through a KV cache runs the same forward pass. `in_decode_step` says whether the
one-launch kernel (decode_step.cu) computes the part, too. A new part is an entry, a line in its registry
here, and its name in kernels/config.py.
"""

from kernels.config import ModelConfig
from kernels.parts.mlps import Gelu, Mlp, Swiglu
from kernels.parts.norms import LAYERNORM, RMSNORM, Norm
from kernels.parts.positions import Learned, Position, Rope
from kernels.parts.qk_norms import NoQkNorm, QkNorm, RmsQkNorm

NORMS: dict[str, Norm] = {"rmsnorm": RMSNORM, "layernorm": LAYERNORM}
POSITIONS: dict[str, Position] = {"rope": Rope(), "learned": Learned()}
QK_NORMS: dict[str, QkNorm] = {
    "none": NoQkNorm(),
    "weighted": RmsQkNorm(weighted=True),
    "unweighted": RmsQkNorm(weighted=False),
}
MLPS: dict[str, Mlp] = {"swiglu": Swiglu(), "gelu": Gelu()}


def decode_step_supports(c: ModelConfig) -> bool:
    """Whether decode_step.cu computes all parts of the model."""
    parts = NORMS[c.norm], POSITIONS[c.position], QK_NORMS[c.qk_norm], MLPS[c.mlp]
    return all(part.in_decode_step for part in parts)
