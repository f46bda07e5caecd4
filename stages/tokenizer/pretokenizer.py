"""GPT-2's pre-tokenization over bytes: the words of a text and their counts, in compiled code.

A word is a match of this pattern, from left to right. A merge never crosses a word boundary.

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

Each byte that is not well-formed UTF-8 counts as one character that is neither letter, number nor white
space. So any bytes can be split into words, and the concatenated words are those bytes.

Bytes are widened with int(), and no product reaches 2^63, since signed overflow is undefined in compiled
code. So the results are the same with NUMBA_DISABLE_JIT=1.

Source: Radford et al. 2019, section 2.2 (byte-level BPE); the pattern is that of the released GPT-2 encoder.
"""

from typing import Any

import numba
import numpy as np

from kernels.cpu.jit import jit
from stages.tokenizer.unicode_classes import OTHER, SPACE

Array = np.ndarray[Any, np.dtype[np.integer[Any]]]

# For entry points called from several Python threads: like `jit`, without the GIL. Threads that fetch work
# items balance the load better than prange's equal parts, and compile in a fraction of the time.
jit_nogil = numba.njit(cache=True, nogil=True)

# Inlined, for functions called per byte or word: a quarter less time (30 MB of Python sources, 2 cores,
# 2026-11).
jit_inline = numba.njit(cache=True, inline="always")

# A longer document is cut into spans, so that threads can share it. Cuts are at word boundaries that need no
# context.
PIECE_BYTES = 1 << 17

# Words up to this length are their own hash key: three integers of 7 bytes. Longer words are hashed and
# compared.
KEY_BYTES = 21
_LOW = (1 << 31) - 1


@jit
def classify(data: Array, pos: int, stop: int, classes: Array) -> int:
    """Class and byte length of the character at `pos`, packed as class << 3 | length. An ill-formed byte is
    OTHER, length 1.
    """
    byte = int(data[pos])
    if byte < 0x80:
        return int(classes[byte]) << 3 | 1
    invalid = OTHER << 3 | 1
    if byte < 0xC2 or byte > 0xF4:
        return invalid
    length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
    if pos + length > stop:
        return invalid
    code = byte & (0x7F >> length)
    for i in range(pos + 1, pos + length):
        byte = int(data[i])
        if byte & 0xC0 != 0x80:
            return invalid
        code = code << 6 | byte & 0x3F
    # Overlong forms, surrogates and code points beyond U+10FFFF are ill-formed too.
    if length == 3 and (code < 0x800 or 0xD800 <= code < 0xE000):
        return invalid
    if length == 4 and (code < 0x10000 or code > 0x10FFFF):
        return invalid
    return int(classes[code]) << 3 | length


@jit_inline
def _run_end(data: Array, pos: int, stop: int, kind: int, classes: Array) -> int:
    """End of the run of characters of class `kind` that continues at `pos`."""
    while pos < stop:
        byte = int(data[pos])
        if byte < 0x80:
            if classes[byte] != kind:
                break
            pos += 1
        else:
            character = classify(data, pos, stop, classes)
            if character >> 3 != kind:
                break
            pos += character & 7
    return pos


@jit_inline
def _contraction_end(data: Array, pos: int, stop: int) -> int:
    """End of 's 't 'm 'd 're 've 'll, whose apostrophe is at `pos`; `pos`: no contraction."""
    if pos + 1 >= stop:
        return pos
    first = int(data[pos + 1])
    if first == 115 or first == 116 or first == 109 or first == 100:  # s t m d
        return pos + 2
    if pos + 2 < stop:
        second = int(data[pos + 2])
        if second == 101 and (first == 114 or first == 118):  # re ve
            return pos + 3
        if second == 108 and first == 108:  # ll
            return pos + 3
    return pos


@jit_inline
def word_end(data: Array, pos: int, stop: int, classes: Array) -> int:
    """End of the word that starts at `pos`; the text ends at `stop`."""
    byte = int(data[pos])
    if byte == 39:
        end = _contraction_end(data, pos, stop)
        if end > pos:
            return end
    first = pos + 1 if byte == 32 and pos + 1 < stop else pos
    character = classify(data, first, stop, classes)
    kind = character >> 3
    if kind != SPACE:
        return _run_end(data, first + (character & 7), stop, kind, classes)
    # A run of white space leaves its last character to the next word, unless it is the only one or the text
    # ends.
    end = last = pos
    while end < stop:
        character = classify(data, end, stop, classes)
        if character >> 3 != SPACE:
            break
        last = end
        end += character & 7
    return end if end == stop or last == pos else last


@jit
def cut_spans(data: Array, document_ends: Array, piece_bytes: int) -> tuple[Array, Array]:
    """Cut documents into spans that can be split into words independently.

    A cut is before a space or newline that follows a printable ASCII byte. No word contains those two in this
    order, and the pattern looks neither back nor past such a boundary.

    Args:
        data: (bytes,) uint8, the concatenated documents.
        document_ends: (documents,) int64, end offset of each.
        piece_bytes: a span ends at the first such boundary after this many bytes.

    Returns:
        spans (n, 2) int64, begin and end; span_ends (documents,) int64, the number of spans up to each
        document's end.
    """
    spans = np.empty((document_ends.size + data.size // piece_bytes + 1, 2), dtype=np.int64)
    span_ends = np.empty(document_ends.size, dtype=np.int64)
    num_spans = 0
    start = 0
    for document in range(document_ends.size):
        stop = int(document_ends[document])
        pos = start + piece_bytes
        while pos < stop:
            if (data[pos] == 32 or data[pos] == 10) and 32 < data[pos - 1] < 127:
                spans[num_spans, 0] = start
                spans[num_spans, 1] = pos
                num_spans += 1
                start = pos
                pos += piece_bytes
            else:
                pos += 1
        spans[num_spans, 0] = start
        spans[num_spans, 1] = stop
        num_spans += 1
        span_ends[document] = num_spans
        start = stop
    return spans[:num_spans], span_ends


@jit_inline
def word_key(data: Array, start: int, end: int) -> tuple[int, int, int]:
    """Key of the bytes data[start:end], three integers: the bytes themselves up to KEY_BYTES, else a hash of
    them.
    """
    length = end - start
    a = b = c = 0
    if length <= KEY_BYTES:
        for i in range(start, min(start + 7, end)):
            a = a << 8 | int(data[i])
        for i in range(start + 7, min(start + 14, end)):
            b = b << 8 | int(data[i])
        for i in range(start + 14, end):
            c = c << 8 | int(data[i])
        return length << 56 | a, b, c
    for i in range(start, end):
        a = (a ^ int(data[i])) * 0x01000193 & _LOW
        b = (b + int(data[i])) * 0x41C64E6D + 12345 & _LOW
    return 127 << 56 | a, b, length


@jit_inline
def hash_slot(a: int, b: int, c: int, mask: int) -> int:
    """First slot to try for the key (a, b, c) in a table of mask + 1 slots, a power of two up to 2^31."""
    mixed = (a & _LOW) * 0x2E3779B9 ^ (a >> 31) * 0x3C6EF373 ^ (b & _LOW) * 0x27D4EB2F
    mixed ^= (b >> 31) * 0x165667B1 ^ (c & _LOW) * 0x3243F6A9 ^ (c >> 31) * 0x1B873593
    return ((mixed ^ mixed >> 31) & _LOW) * 0x2C1B3C6D >> 28 & mask


@jit_inline
def find_word(table: Array, data: Array, start: int, end: int, words: Array) -> int:
    """Slot of the word data[start:end] in `table`. A new word gets the empty slot, with its key and the index
    -1.

    Args:
        table: (slots, 4) int64: the key (its first integer is 0 in an empty slot), then the index of the
            word.
        words: (n, 2 or more) int64: begin and end in `data` of each word of the table.
    """
    a, b, c = word_key(data, start, end)
    mask = table.shape[0] - 1
    slot = hash_slot(a, b, c, mask)
    while table[slot, 0] != 0:
        if table[slot, 0] == a and table[slot, 1] == b and table[slot, 2] == c:
            if end - start <= KEY_BYTES:
                break
            other = words[table[slot, 3], 0]
            i = 0
            while i < end - start and data[other + i] == data[start + i]:
                i += 1
            if i == end - start:
                break
        slot = (slot + 1) & mask
    if table[slot, 0] == 0:
        table[slot, 0], table[slot, 1], table[slot, 2] = a, b, c
        table[slot, 3] = -1
    return slot


@jit
def _grown_table(table: Array) -> Array:
    """A copy of a hash table with twice as many slots."""
    grown = np.zeros((table.shape[0] * 2, 4), dtype=np.int64)
    mask = grown.shape[0] - 1
    for row in range(table.shape[0]):
        if table[row, 0] != 0:
            slot = hash_slot(int(table[row, 0]), int(table[row, 1]), int(table[row, 2]), mask)
            while grown[slot, 0] != 0:
                slot = (slot + 1) & mask
            for column in range(4):
                grown[slot, column] = table[row, column]
    return grown


@jit
def _doubled(rows: Array) -> Array:
    """A copy of the rows (n, 3) with room for n more. Loops, since array assignments take seconds to
    compile.
    """
    grown = np.empty((2 * rows.shape[0], 3), dtype=np.int64)
    for row in range(rows.shape[0]):
        for column in range(3):
            grown[row, column] = rows[row, column]
    return grown


@jit_nogil
def count_words(data: Array, spans: Array, split: bool, classes: Array) -> Array:
    """The distinct words of some spans, with their counts.

    Args:
        data: (bytes,) uint8.
        spans: (n, 3) int64: begin, end, and the weight of the span in the counts.
        split: whether to split the spans into words; else each span is one word.
        classes: from unicode_classes.character_classes().

    Returns:
        (words, 3) int64: begin and end of the word's first occurrence, and its count.
    """
    table: Array = np.zeros((1 << 14, 4), dtype=np.int64)
    words: Array = np.empty((1 << 13, 3), dtype=np.int64)
    num_words = 0
    for s in range(spans.shape[0]):
        start = int(spans[s, 0])
        stop = int(spans[s, 1])
        while start < stop:
            end = word_end(data, start, stop, classes) if split else stop
            slot = find_word(table, data, start, end, words)
            word = table[slot, 3]
            if word >= 0:
                words[word, 2] += spans[s, 2]
            else:
                table[slot, 3] = num_words
                words[num_words, 0] = start
                words[num_words, 1] = end
                words[num_words, 2] = spans[s, 2]
                num_words += 1
                if num_words == words.shape[0]:
                    words = _doubled(words)
                    table = _grown_table(table)
            start = end
    return words[:num_words].copy()
