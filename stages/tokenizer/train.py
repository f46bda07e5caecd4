"""BPE training: merges are learned from weighted words, in compiled code.

The most frequent pair of neighbouring tokens inside words becomes a new token. At a tie it is the pair with
the smallest left id, then the smallest right id. Counts are exact after every merge. Only pairs next to a
merged pair are recounted, so the time grows with the distinct words of the text, not with merges x text.

Ids are below 65,536, so a pair is the integer left << 16 | right.

Source: Sennrich et al. 2016, arXiv:1508.07909, algorithm 1; the tie-break is that of Hugging Face tokenizers.
"""

import numpy as np

from kernels.cpu.jit import jit
from stages.tokenizer.pretokenizer import Array, hash_slot, jit_nogil

# Columns of `nodes` (one row per byte of the words): the token that starts there (-1: inside a token), the
# rows of the next and the previous token of the word (-1: none), and the count of the word.
TOKEN, NEXT, PREVIOUS, WEIGHT = 0, 1, 2, 3
# Columns of `pairs` (an open hash table): the pair + 1 (0: empty slot), its count, the first of its places (a
# row of `places`, a linked list: node, next place), and the merge that last raised the count.
PAIR, COUNT, PLACES, RAISED = 0, 1, 2, 3
# Heap keys are (_MAX_COUNT - count) << 32 | pair. The smallest key is the most frequent pair; at a tie, the
# smaller pair.
_MAX_COUNT = (1 << 30) - 1


@jit
def heap_push(heap: Array, size: int, key: int) -> int:
    """Push `key` onto a min-heap, the first `size` elements of `heap`; returns the new size."""
    child = size
    while child > 0:
        parent = (child - 1) >> 1
        if heap[parent] <= key:
            break
        heap[child] = heap[parent]
        child = parent
    heap[child] = key
    return size + 1


@jit
def heap_pop(heap: Array, size: int) -> int:
    """Remove the smallest key, heap[0]; returns the new size. The caller reads heap[0] before."""
    size -= 1
    key = heap[size]
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[parent] = heap[child]
        parent = child
    heap[parent] = key
    return size


@jit
def _find_pair(pairs: Array, pair: int) -> int:
    """Slot of `pair`, or the empty slot for it."""
    mask = pairs.shape[0] - 1
    slot = hash_slot(pair, 0, 0, mask)
    while pairs[slot, PAIR] != 0 and pairs[slot, PAIR] != pair + 1:
        slot = (slot + 1) & mask
    return slot


@jit
def _with_room(pairs: Array, used: int, more: int) -> Array:
    """The hash table of pairs, grown if necessary: `used` + `more` entries fill at most half of it."""
    slots = pairs.shape[0]
    while slots < 2 * (used + more):
        slots *= 2
    if slots == pairs.shape[0]:
        return pairs
    grown = np.zeros((slots, 4), dtype=np.int64)
    for row in range(pairs.shape[0]):
        if pairs[row, PAIR] != 0:
            slot = _find_pair(grown, int(pairs[row, PAIR]) - 1)
            for column in range(4):
                grown[slot, column] = pairs[row, column]
    return grown


@jit
def _raise_count(
    pairs: Array, pair: int, node: int, nodes: Array, places: Array, merge: int, state: Array, raised: Array
) -> None:
    """Add the pair at `node` to its count and to its list of places.

    `raised` collects the slots whose counts this merge raised. `state` is [slots used in pairs, rows used in
    places, slots in raised].
    """
    slot = _find_pair(pairs, pair)
    if pairs[slot, PAIR] == 0:
        pairs[slot, PAIR] = pair + 1
        pairs[slot, PLACES] = -1
        pairs[slot, RAISED] = -1
        state[0] += 1
    if pairs[slot, RAISED] != merge:
        pairs[slot, RAISED] = merge
        raised[state[2]] = slot
        state[2] += 1
    pairs[slot, COUNT] += nodes[node, WEIGHT]
    places[state[1], 0] = node
    places[state[1], 1] = pairs[slot, PLACES]
    pairs[slot, PLACES] = state[1]
    state[1] += 1


@jit
def _merge_at(
    node: int, token: int, nodes: Array, pairs: Array, places: Array, merge: int, state: Array, raised: Array
) -> None:
    """Merge the token at `node` with its next, and update the counts of the pairs with both neighbours."""
    gone = int(nodes[node, NEXT])
    left, right = int(nodes[node, TOKEN]), int(nodes[gone, TOKEN])
    before, after = int(nodes[node, PREVIOUS]), int(nodes[gone, NEXT])
    nodes[node, TOKEN] = token
    nodes[node, NEXT] = after
    nodes[gone, TOKEN] = -1
    if before >= 0:
        neighbour = int(nodes[before, TOKEN])
        pairs[_find_pair(pairs, neighbour << 16 | left), COUNT] -= nodes[node, WEIGHT]
        _raise_count(pairs, neighbour << 16 | token, before, nodes, places, merge, state, raised)
    if after >= 0:
        neighbour = int(nodes[after, TOKEN])
        nodes[after, PREVIOUS] = node
        pairs[_find_pair(pairs, right << 16 | neighbour), COUNT] -= nodes[node, WEIGHT]
        _raise_count(pairs, token << 16 | neighbour, node, nodes, places, merge, state, raised)


@jit
def _holds(nodes: Array, node: int, left: int, right: int) -> bool:
    """Whether the pair `left`, `right` is at `node`."""
    return nodes[node, TOKEN] == left and nodes[node, NEXT] >= 0 and nodes[nodes[node, NEXT], TOKEN] == right


@jit
def _merge_everywhere(
    slot: int, token: int, nodes: Array, pairs: Array, places: Array, merge: int, state: Array, raised: Array
) -> None:
    """Merge every occurrence of the pair in `slot` into `token`, from left to right within each word."""
    pair = int(pairs[slot, PAIR]) - 1
    left, right = pair >> 16, pair & 0xFFFF
    place = int(pairs[slot, PLACES])
    while place >= 0:
        node = int(places[place, 0])
        place = int(places[place, 1])
        if not _holds(nodes, node, left, right):
            continue
        # In a run of equal tokens the pairs overlap. Go to the start of the run, and merge the whole run now.
        if left == right:
            while nodes[node, PREVIOUS] >= 0 and nodes[nodes[node, PREVIOUS], TOKEN] == left:
                node = int(nodes[node, PREVIOUS])
        while node >= 0 and _holds(nodes, node, left, right):
            _merge_at(node, token, nodes, pairs, places, merge, state, raised)
            node = int(nodes[node, NEXT])
            if left != right:
                break
    pairs[slot, COUNT] = 0
    pairs[slot, PLACES] = -1


@jit
def _lay_out(data: Array, words: Array, byte_tokens: Array) -> Array:
    """The nodes of all words, concatenated."""
    length = 0
    for word in range(words.shape[0]):
        length += words[word, 1] - words[word, 0]
    nodes = np.empty((length, 4), dtype=np.int32)
    node = 0
    for word in range(words.shape[0]):
        first = node
        for i in range(words[word, 0], words[word, 1]):
            nodes[node, TOKEN] = byte_tokens[data[i]]
            nodes[node, NEXT] = node + 1
            nodes[node, PREVIOUS] = node - 1
            nodes[node, WEIGHT] = words[word, 2]
            node += 1
        nodes[first, PREVIOUS] = -1
        nodes[node - 1, NEXT] = -1
    return nodes


@jit
def _push_raised(heap: Array, size: int, pairs: Array, raised: Array, state: Array) -> int:
    """Push the pairs whose counts were raised onto the heap; returns its size."""
    for i in range(state[2]):
        count = int(pairs[raised[i], COUNT])
        if count > 0:
            size = heap_push(heap, size, (_MAX_COUNT - count) << 32 | int(pairs[raised[i], PAIR]) - 1)
    state[2] = 0
    return size


@jit
def _pop_most_frequent(heap: Array, size: int, pairs: Array) -> tuple[int, int]:
    """Slot of the most frequent pair (-1: none is left), and the heap's new size."""
    while size > 0:
        key = int(heap[0])
        size = heap_pop(heap, size)
        slot = _find_pair(pairs, key & 0xFFFFFFFF)
        count = int(pairs[slot, COUNT])
        if count == _MAX_COUNT - (key >> 32):
            return slot, size
        # Stale key: the count has fallen since. Push the pair with its current count.
        if count > 0:
            size = heap_push(heap, size, (_MAX_COUNT - count) << 32 | key & 0xFFFFFFFF)
    return -1, size


@jit_nogil
def learn_merges(data: Array, words: Array, byte_tokens: Array, num_tokens: int) -> Array:
    """Learn merges until there are `num_tokens` tokens, or every word is one token.

    No two merges give the same bytes. A merge replaces every occurrence of its pair, so equal bytes that
    become one token were merged in the same way.

    Args:
        data: (bytes,) uint8.
        words: (words, 3) int64 from count_words: begin, end, count; the sum of count x length is below 2^30.
        byte_tokens: (256,) int32, the token of each byte, 0 to 255; the first new token is 256.
        num_tokens: 256 to 65,536.

    Returns:
        (merges, 3) int32: left, right and resulting token, in the order learned.
    """
    nodes = _lay_out(data, words, byte_tokens)
    places = np.empty((3 * nodes.shape[0] + 1, 2), dtype=np.int32)
    pairs: Array = np.zeros((1 << 18, 4), dtype=np.int64)
    raised = np.empty(2 * 65536, dtype=np.int64)
    state = np.zeros(3, dtype=np.int64)
    for node in range(nodes.shape[0]):
        if nodes[node, NEXT] >= 0:
            pair = int(nodes[node, TOKEN]) << 16 | int(nodes[node + 1, TOKEN])
            _raise_count(pairs, pair, node, nodes, places, 0, state, raised)
    # Each push belongs to a row of `places`, and each merge removes a node. So neither array overflows.
    heap, size = np.empty(places.shape[0], dtype=np.int64), 0
    merges, num_merges = np.empty((nodes.shape[0], 3), dtype=np.int32), 0
    while 256 + num_merges < num_tokens:
        size = _push_raised(heap, size, pairs, raised, state)
        # New pairs of a merge: at most its token with every token, on either side.
        pairs = _with_room(pairs, state[0], 2 * (256 + num_merges) + 2)
        slot, size = _pop_most_frequent(heap, size, pairs)
        if slot < 0:
            break
        pair, token = int(pairs[slot, PAIR]) - 1, 256 + num_merges
        merges[num_merges, 0], merges[num_merges, 1], merges[num_merges, 2] = pair >> 16, pair & 0xFFFF, token
        num_merges += 1
        _merge_everywhere(slot, token, nodes, pairs, places, num_merges, state, raised)
    return merges[:num_merges].copy()
