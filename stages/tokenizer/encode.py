"""Encoding: the merges of a tokenizer are applied to every word of a text, in compiled code.

In each word the pair with the lowest rank (its merge was learned first) is merged, the leftmost first, until
no pair has a merge. Words and their tokens are cached, since a few words make up most of a text.
"""

import numpy as np

from kernels.cpu.jit import jit
from stages.tokenizer.pretokenizer import KEY_BYTES, Array, find_word, hash_slot, jit_nogil, word_end
from stages.tokenizer.train import heap_pop, heap_push

# Columns of `nodes`, which has one row per byte of a word: the token that starts there, the rows of the next
# and the previous token, and the rank of its merge with the next token (-1: none).
TOKEN, NEXT, PREVIOUS, RANK = 0, 1, 2, 3


@jit
def rank_table(merges: Array) -> Array:
    """Hash table from pair to rank: (slots,) int64 of pair << 31 | rank; -1: empty slot. merges: from
    learn_merges.
    """
    slots = 16
    while slots < 2 * merges.shape[0]:
        slots *= 2
    table = np.full(slots, -1, dtype=np.int64)
    for rank in range(merges.shape[0]):
        pair = int(merges[rank, 0]) << 16 | int(merges[rank, 1])
        slot = hash_slot(pair, 0, 0, slots - 1)
        while table[slot] >= 0:
            slot = (slot + 1) & (slots - 1)
        table[slot] = pair << 31 | rank
    return table


@jit
def _rank(ranks: Array, left: int, right: int) -> int:
    """Rank of the merge of two tokens; -1: none."""
    pair = left << 16 | right
    slot = hash_slot(pair, 0, 0, ranks.size - 1)
    while ranks[slot] >= 0:
        if ranks[slot] >> 31 == pair:
            return int(ranks[slot]) & 0x7FFFFFFF
        slot = (slot + 1) & (ranks.size - 1)
    return -1


@jit
def _queue_pair(node: int, length: int, ranks: Array, nodes: Array, heap: Array, size: int) -> int:
    """Push the pair at `node` onto the heap if it has a merge, and store its rank; returns the heap's
    size.
    """
    following = int(nodes[node, NEXT])
    rank = -1
    if following < length:
        rank = _rank(ranks, int(nodes[node, TOKEN]), int(nodes[following, TOKEN]))
        if rank >= 0:
            size = heap_push(heap, size, rank << 32 | node)
    nodes[node, RANK] = rank
    return size


@jit
def _merge_word(
    data: Array,
    start: int,
    end: int,
    out: Array,
    at: int,
    byte_tokens: Array,
    merges: Array,
    ranks: Array,
    nodes: Array,
    heap: Array,
) -> int:
    """Write the tokens of the word data[start:end] to out[at:]; returns their number.

    `nodes` (n, 4) int32 and `heap` (3 n,) int64 are scratch memory for a word of up to n bytes.
    """
    length = end - start
    size = 0
    for i in range(length):
        nodes[i, TOKEN] = byte_tokens[data[start + i]]
        nodes[i, NEXT], nodes[i, PREVIOUS] = i + 1, i - 1
    for i in range(length):
        size = _queue_pair(i, length, ranks, nodes, heap, size)
    while size > 0:
        rank, node = int(heap[0]) >> 32, int(heap[0]) & 0xFFFFFFFF
        size = heap_pop(heap, size)
        # Stale entry: another merge has since consumed one of its tokens.
        if nodes[node, RANK] != rank:
            continue
        gone = int(nodes[node, NEXT])
        after = int(nodes[gone, NEXT])
        nodes[gone, RANK] = -1
        nodes[node, TOKEN], nodes[node, NEXT] = merges[rank, 2], after
        if after < length:
            nodes[after, PREVIOUS] = node
        size = _queue_pair(node, length, ranks, nodes, heap, size)
        if nodes[node, PREVIOUS] >= 0:
            size = _queue_pair(int(nodes[node, PREVIOUS]), length, ranks, nodes, heap, size)
    count = 0
    node = 0
    while node < length:
        out[at + count] = nodes[node, TOKEN]
        count += 1
        node = int(nodes[node, NEXT])
    return count


@jit_nogil
def encode_spans(
    data: Array,
    spans: Array,
    out: Array,
    counts: Array,
    classes: Array,
    byte_tokens: Array,
    merges: Array,
    ranks: Array,
    cache: Array,
    cached: Array,
    state: Array,
) -> None:
    """Write the tokens of the span that starts at data[b] to out[b:], and their number to counts.

    Args:
        data: (bytes,) uint8.
        spans: (n, 2) int64 from cut_spans.
        out: (bytes,) int32, output; positions without a token keep their value.
        counts: (n,) int64, output.
        classes: from character_classes().
        byte_tokens: (256,) int32, the token of each byte.
        merges, ranks: (merges, 3) int32, and rank_table(merges).
        cache: (slots, 4) int64, in/out: a word's key, then the index of its tokens in `cached` << 8 | their
            number.
        cached: (n,) int32, in/out: tokens of the cached words.
        state: (2,) int64, in/out: number of words in `cache`, used length of `cached`. When either is full,
            the cache is emptied.
    """
    longest = 256
    nodes, heap = np.empty((longest, 4), dtype=np.int32), np.empty(3 * longest, dtype=np.int64)
    for s in range(spans.shape[0]):
        start, stop, at = int(spans[s, 0]), int(spans[s, 1]), int(spans[s, 0])
        while start < stop:
            end = word_end(data, start, stop, classes)
            slot = -1
            if end - start <= KEY_BYTES:
                slot = find_word(cache, data, start, end, spans)
                if cache[slot, 3] >= 0:
                    first = int(cache[slot, 3]) >> 8
                    for i in range(first, first + (int(cache[slot, 3]) & 255)):
                        out[at] = cached[i]
                        at += 1
                    start = end
                    continue
            if end - start > longest:
                longest = end - start
                nodes, heap = np.empty((longest, 4), dtype=np.int32), np.empty(3 * longest, dtype=np.int64)
            count = _merge_word(data, start, end, out, at, byte_tokens, merges, ranks, nodes, heap)
            if slot >= 0:
                cache[slot, 3] = state[1] << 8 | count
                for i in range(count):
                    cached[state[1] + i] = out[at + i]
                state[0] += 1
                state[1] += count
                if 2 * state[0] > cache.shape[0] or state[1] + KEY_BYTES > cached.size:
                    for row in range(cache.shape[0]):
                        cache[row, 0] = 0
                    state[0], state[1] = 0, 0
            at += count
            start = end
        counts[s] = at - spans[s, 0]
