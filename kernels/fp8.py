"""What an engine holds for numerics.precision fp8 beside bf16's buffers: casts of the blocks' weights, and
their scales.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kernels.arena import Arena, Buffer
from kernels.config import ModelConfig
from kernels.ops import Fp8Ops, Weight
from kernels.parameters import Parameter, flat_size, named

Array = np.ndarray[Any, Any]

# Widths, and the length of a transposed row, are multiples of this: kernels load 16 bytes at once, and FP8
# matmuls ask for it.
MULTIPLE = 16


def pitch(rows: int) -> int:
    """Elements of a transposed row over so many rows."""
    return -(-rows // MULTIPLE) * MULTIPLE


def block_weights(table: list[Parameter]) -> list[Parameter]:
    """The weights of the blocks' linear layers, with offsets in flat arrays of their own."""
    found: list[Parameter] = []
    for p in table:
        if p.is_block_matrix:
            offset = found[-1].offset + found[-1].padded_size if found else 0
            found.append(replace(p, offset=offset))
    return found


def fp8_plan(config: ModelConfig, table: list[Parameter], rows: int) -> list[Buffer]:
    """Casts of the weights and their transposes, scales and maxima, and each layer's transposed casts of
    matmul inputs.
    """
    weights, byte = block_weights(table), np.dtype(np.uint8)
    inputs = {linear: inputs for linear, (_, inputs) in config.linears.items()}
    return [
        *(
            Buffer(name, "parameters", (flat_size(weights),), byte)
            for name in ("fp8_weights", "fp8_transposed")
        ),
        # Of weight, input and gradient, each at a multiple of 16 bytes, where cuBLASLt wants a scale.
        Buffer("fp8_scales", "parameters", (len(weights), 3, 4), np.dtype(np.float32)),
        Buffer("fp8_amax", "parameters", (len(weights), 2), np.dtype(np.int32)),
        *(
            Buffer(f"fp8_inp_{linear}", "activations", (width * pitch(rows),), byte, config.layers)
            for linear, width in inputs.items()
        ),
    ]


def fp8_weights(
    ops: Fp8Ops, arena: Arena, table: list[Parameter], compute_weights: Mapping[str, Array]
) -> dict[str, Weight]:
    """Handles of the blocks' weights in FP8, by parameter name."""
    weights, found = block_weights(table), {}
    casts, transposed = (named(arena.whole(name), weights) for name in ("fp8_weights", "fp8_transposed"))
    for p, scales, amax in zip(weights, arena.whole("fp8_scales"), arena.whole("fp8_amax"), strict=True):
        saved_inp = arena.whole(f"fp8_inp_{p.part}", p.layer)
        arrays = compute_weights[p.name], casts[p.name], transposed[p.name].reshape(p.shape[::-1]), saved_inp
        found[p.name] = ops.fp8_weight(*arrays, scales=scales, amax=amax)
    return found
