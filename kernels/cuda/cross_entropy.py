"""Launchers of cross_entropy.cu. Mathematics and contracts: kernels/cpu/cross_entropy.py."""

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Kernel

_INSTANCES = tuple(
    (*vector, capped) for vector in ((FLOAT, 1), (FLOAT, 4), (BF16, 1), (BF16, 8)) for capped in (False, True)
)
_FORWARD = Kernel("cross_entropy.cu", "cross_entropy_forward", _INSTANCES)
_BACKWARD = Kernel("cross_entropy.cu", "cross_entropy_backward", _INSTANCES)
_MAX_BLOCK, _VECTORS_PER_THREAD = 1024, 2  # not tuned
_OTHER_SHARED_BYTES = 1280  # per block: its sums, and what the system reserves


def cross_entropy_forward(
    device: Device, nll: Array, correct: Array, logits: Array, targets: Array, *, vocab_size: int,
    softcap: float,
) -> None:  # fmt: skip
    """See kernels/cpu/cross_entropy.py.

    Cost: reads the logits once.
    """
    rows, width = logits.shape
    size, block = _shape(logits)
    device.launch(
        _FORWARD, (logits.dtype, size, softcap > 0), rows, block,
        nll=nll, correct=correct, logits=logits, targets=targets, width=width, vocab_size=vocab_size,
        softcap=softcap,
    )  # fmt: skip


def cross_entropy_backward(
    device: Device, dlogits: Array, nll: Array, targets: Array, weight: Array, *, vocab_size: int,
    softcap: float,
) -> None:  # fmt: skip
    """See kernels/cpu/cross_entropy.py.

    Cost: reads the logits from memory once and writes them once. If shared memory cannot hold two rows, or a
        row is not a multiple of 16 bytes, it reads them a second time, possibly from a cache. 227 KB hold two
        rows of 58,000 bf16 elements.
    """
    rows, width = dlogits.shape
    size, block = _shape(dlogits)
    row_bytes = width * dlogits.dtype.itemsize
    row_in_smem = size > 1 and 2 * (row_bytes + _OTHER_SHARED_BYTES) <= device.shared_bytes
    device.launch(
        _BACKWARD, (dlogits.dtype, size, softcap > 0), rows, block,
        shared_bytes=row_bytes if row_in_smem else 0, dlogits=dlogits, nll=nll, targets=targets,
        weight=weight, width=width, vocab_size=vocab_size, row_in_smem=row_in_smem, softcap=softcap,
    )  # fmt: skip


def _shape(logits: Array) -> tuple[int, int]:
    """Elements per vector, and threads per block.

    A vector has 16 bytes if every row begins at a multiple of 16 bytes, otherwise one element.
    """
    width, size = logits.shape[1], 16 // logits.dtype.itemsize
    if width % size:
        size = 1
    return size, min(_MAX_BLOCK, -(-width // (32 * size * _VECTORS_PER_THREAD)) * 32)
