"""Shapes that operations are tested at, on every device: extents of 1, primes, and a block of a kernel more
or less 1.

The blocks on the CPU: 16 groups of rows, 64 columns of an embedding, 4 queries or features of attention, 4096
gradients.
"""

from typing import NamedTuple

# (rows, width), of norms, biases and activations.
ROWS = ((1, 2), (2, 7), (15, 64), (16, 31), (17, 65), (131, 5))

# (rows, outputs, inputs)
MATMUL = ((1, 1, 1), (1, 7, 3), (17, 5, 64), (31, 65, 2), (64, 33, 128), (530, 70, 90))

# (rows, vocab_size, padded_vocab)
CROSS_ENTROPY = ((1, 1, 1), (1, 2, 128), (17, 61, 128), (7, 128, 128), (5, 257, 384))

# Elements of a flat gradient.
GRADIENTS = (1, 4095, 4096, 4097, 10007)


class Embedding(NamedTuple):
    """Extents of an embedding; a token begins a document with the probability `documents`."""

    batch: int
    length: int
    dim: int
    vocab_size: int
    documents: float


EMBEDDING = (
    Embedding(1, 1, 1, 1, 0.0),
    Embedding(2, 7, 63, 5, 0.3),
    Embedding(1, 13, 64, 61, 0.0),
    Embedding(3, 5, 65, 3, 0.4),
    Embedding(2, 3, 129, 128, 0.0),
)


class Attention(NamedTuple):
    """Extents of attention; a token begins a document with the probability `documents`."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    documents: float


ATTENTION = (
    Attention(1, 1, 1, 1, 1, 0.0),
    Attention(2, 1, 3, 1, 10, 0.0),
    Attention(1, 3, 2, 1, 3, 0.0),
    Attention(2, 4, 4, 2, 4, 0.4),
    Attention(2, 5, 4, 4, 5, 0.4),
    Attention(1, 13, 6, 3, 7, 0.0),
    Attention(2, 17, 4, 1, 16, 0.2),
    Attention(1, 33, 2, 2, 64, 0.1),
)

# (heads, kv_heads, head_dim) of rope, at any batch and length: pairs need an even width.
ROPE = ((1, 1, 2), (3, 1, 10), (4, 2, 16), (2, 2, 64))
