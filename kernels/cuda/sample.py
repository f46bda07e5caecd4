"""Launchers of sample.cu and suppress_tokens.cu. Contracts: kernels/cpu/sample.py."""

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Kernel

_INSTANCES = ((FLOAT, 1), (FLOAT, 4), (BF16, 1), (BF16, 8))
_GREEDY = Kernel("sample.cu", "sample_greedy", _INSTANCES, dependent_launch=True)
_DRAW = Kernel(
    "sample.cu",
    "sample_draw",
    tuple((*vector, capped) for vector in _INSTANCES for capped in (False, True)),
    dependent_launch=True,
)
_SUPPRESS = Kernel("suppress_tokens.cu", "suppress_tokens", ((FLOAT,), (BF16,)))
_BLOCK = 1024  # of sample.cu
_SUPPRESS_BLOCK = 64


def suppress_tokens(device: Device, logits: Array, ids: Array) -> None:
    """See kernels/cpu/sample.py."""
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
    softcap: float,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    """See kernels/cpu/sample.py. logits (B, Vp) are fp32 or bf16. Columns from vocab_size on are ignored.

    Precision: probabilities and their sums in fp64. Rounding may change a sample that is very close to a
        limit.
    Cost: reads the logits once at temperature 0, or without top_k and top_p. Each of top_k and top_p reads
        every row about 15 times, from a cache.
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
        _DRAW, (*template, softcap > 0), rows, _BLOCK,
        out=out, logits=logits, uniform=uniform, width=width, vocab_size=vocab_size,
        softcap=softcap, inverse_temperature=1 / temperature, top_k=top_k, top_p=top_p,
    )  # fmt: skip
