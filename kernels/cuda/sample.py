"""Launchers of sample.cu and suppress_tokens.cu; the rule is that of kernels.cpu.sample."""

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Kernel

_INSTANCES = ((FLOAT, 1), (FLOAT, 4), (BF16, 1), (BF16, 8))
_GREEDY = Kernel("sample.cu", "sample_greedy", _INSTANCES, dependent_launch=True)
_DRAW = Kernel("sample.cu", "sample_draw", _INSTANCES, dependent_launch=True)
_SUPPRESS = Kernel("suppress_tokens.cu", "suppress_tokens", ((FLOAT,), (BF16,)))
_BLOCK = 1024  # sample.cu's
_SUPPRESS_BLOCK = 64


def suppress_tokens(device: Device, logits: Array, ids: Array) -> None:
    """See kernels.cpu.sample.suppress_tokens."""
    rows, width = logits.shape
    blocks = (-(-ids.size // _SUPPRESS_BLOCK), rows)
    device.launch(
        _SUPPRESS,
        (logits.dtype,),
        blocks,
        _SUPPRESS_BLOCK,
        logits=logits,
        ids=ids,
        width=width,
        count=ids.size,
    )


def sample(
    device: Device,
    out: Array,
    logits: Array,
    uniform: Array,
    *,
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    """See kernels.cpu.sample.sample; logits (B, Vp) fp32 or bf16, whose columns from vocab_size on take no part.

    Precision: probabilities and their sums in fp64; a draw within rounding of a border may fall on its other side.
    Cost: temperature 0, and a draw without top_k and top_p, read the logits once. Each of these two has a block read its row
        some 15 times, out of a cache.
    """
    rows, width = logits.shape
    size = 16 // logits.dtype.itemsize
    template = (logits.dtype, 1 if width % size else size)
    if temperature == 0:
        device.launch(
            _GREEDY, template, rows, _BLOCK, out=out, logits=logits, width=width, vocab_size=vocab_size
        )
        return
    device.launch(
        _DRAW, template, rows, _BLOCK,
        out=out, logits=logits, uniform=uniform, width=width, vocab_size=vocab_size, inverse_temperature=1 / temperature,
        top_k=top_k, top_p=top_p,
    )  # fmt: skip
