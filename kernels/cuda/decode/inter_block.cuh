// How blocks of one launch exchange numbers without a grid barrier. Each number shares an 8-byte word with a
// tag. The word is stored and loaded atomically. A reader polls until the word holds the tag that it waits
// for. One exchange costs one trip through L2 and back; a grid barrier costs three.
//
// Tags: every launch continues from the last tag of the launch before, so a stale word never matches. A
//       persistent counter, zero at first, stores the last tag. docs/kernels/one_launch_token.md covers the
//       wrap-around.
// Order: no fence is needed, as value and tag travel in one word.
// Overwriting: the next writer of a word depends on results of all its readers, directly or through other
//              blocks. A block publishes results only after a __syncthreads that follows all its reads.
// Residency: all blocks must be resident at once: at most one block a multiprocessor, and each must have room
//            for one. A plain launch suffices: whatever else still runs does not wait for these blocks, and
//            ends.
#pragma once

#include "vectors.cuh"

using Word = unsigned long long;  // the tag in the upper half, the value in the lower

inline void store_word(Word* address, Word word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

inline void store_two_words(Word* address, Word first, Word second) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(first), "l"(second)
                 : "memory");
}

inline void load_two_words(Word& first, Word& second, const Word* address) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(first), "=l"(second)
                 : "l"(address)
                 : "memory");
}

inline Word load_word(const Word* address) {
    Word word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}

inline void publish(Word* address, unsigned bits, unsigned tag) {
    store_word(address, (Word)tag << 32 | bits);
}
inline void publish(Word* address, float value, unsigned tag) {
    publish(address, __float_as_uint(value), tag);
}
// address: a multiple of 16 bytes.
inline void publish_two(Word* address, float first, float second, unsigned tag) {
    store_two_words(address, (Word)tag << 32 | __float_as_uint(first),
                    (Word)tag << 32 | __float_as_uint(second));
}

// Load COUNT values of 32 bits, and return whether all their words hold the tag. address: a multiple of 16
// bytes unless COUNT is 1.
template <int COUNT>
bool load_published(unsigned (&to)[COUNT], const Word* address, unsigned tag) {
    static_assert(COUNT == 1 || COUNT % 2 == 0);
    Word word[COUNT];
    if constexpr (COUNT == 1) {
        word[0] = load_word(address);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) load_two_words(word[i], word[i + 1], address + i);
    }
    bool ready = true;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        ready = ready && (unsigned)(word[i] >> 32) == tag;
        to[i] = (unsigned)word[i];
    }
    return ready;
}

template <int COUNT>
bool load_published(float (&to)[COUNT], const Word* address, unsigned tag) {
    unsigned bits[COUNT];
    const bool ready = load_published(bits, address, tag);
#pragma unroll
    for (int i = 0; i < COUNT; i++) to[i] = __uint_as_float(bits[i]);
    return ready;
}

// The tags of one launch: 1 .. `used`, relative to the last tag of the launch before.
struct LaunchTags {
    unsigned* counter;  // [2]: the last tag of the launch before; how many blocks have read it
    unsigned base;

    // All threads of the block must call it: it contains a barrier.
    explicit LaunchTags(unsigned* counter_) : counter(counter_), base(*(volatile unsigned*)counter_) {
        __syncthreads();  // separates all threads' reads of the counter from the block's report
        if (threadIdx.x == 0) {
            __threadfence();  // orders the reads before the report
            atomicAdd(counter + 1, 1);
        }
    }
    unsigned tag(int number) const { return base + number; }
    // One thread of block 0 stores the last tag, once all blocks have read the previous one.
    void finish(int used) const {
        if (blockIdx.x > 0 || threadIdx.x > 0) return;
        while (*(volatile unsigned*)(counter + 1) < gridDim.x) {}
        __threadfence();  // orders the other blocks' reads before the store
        counter[0] = base + used;
        counter[1] = 0;
    }
};
