"""What an engine holds for numerics.precision fp8 beside what bf16 has: its buffers, and the weights over them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kernels.arena import Arena, Buffer
from kernels.config import ModelConfig
from kernels.parameters import RUN, Parameter, flat_size, named

Array = np.ndarray[Any, Any]

MULTIPLE = (
    16  # of widths, and of a transposed row: what kernels load and store at once, and products of FP8 ask for
)


def pitch(rows: int) -> int:
    """The length of a transposed row of so many."""
    return -(-rows // MULTIPLE) * MULTIPLE


def block_products(table: list[Parameter]) -> list[Parameter]:
    """The weights of the blocks' products, at their places in flat arrays of their own."""
    found: list[Parameter] = []
    for p in table:
        if p.hidden:
            found.append(replace(p, offset=found[-1].offset + found[-1].runs * RUN if found else 0))
    return found


def fp8_plan(config: ModelConfig, table: list[Parameter], rows: int) -> list[Buffer]:
    """What products in FP8 hold: weights' casts; scales and magnitudes; inputs' transposed casts, kept for the way back."""
    products, byte = block_products(table), np.dtype(np.uint8)
    widths = {p.name.split(".")[2]: p.shape[1] for p in products}
    return [
        *(
            Buffer(name, "parameters", (flat_size(products),), byte)
            for name in ("fp8_weights", "fp8_transposed")
        ),
        Buffer(
            "fp8_scales", "parameters", (len(products), 3, 4), np.dtype(np.float32)
        ),  # each at a multiple of 16 bytes
        Buffer("fp8_most", "parameters", (len(products), 2), np.dtype(np.int32)),
        *(
            Buffer(f"fp8_inp_{key}", "activations", (width * pitch(rows),), byte, config.layers)
            for key, width in widths.items()
        ),
    ]


def fp8_weights(
    ops: Any, plan: list[Buffer], arena: Arena, table: list[Parameter], read: Mapping[str, Array]
) -> dict[str, Any]:
    """The weights of the blocks' products as those of FP8 take them, by name; none where the plan has no casts."""
    if "fp8_weights" not in arena:
        return {}
    shapes, products, found = {buffer.name: buffer.shape for buffer in plan}, block_products(table), {}
    casts, turned = (
        named(arena.view(name, shapes[name]), products) for name in ("fp8_weights", "fp8_transposed")
    )
    numbers = (arena.view(name, shapes[name]) for name in ("fp8_scales", "fp8_most"))
    for p, scales, most in zip(products, *numbers, strict=True):
        _, layer, linear, _ = p.name.split(".")
        saved = arena.view(f"fp8_inp_{linear}", shapes[f"fp8_inp_{linear}"], int(layer))
        arrays = read[p.name], casts[p.name], turned[p.name].reshape(p.shape[::-1]), saved
        found[p.name] = ops.fp8_weight(*arrays, scales=scales, most=most)
    return found
