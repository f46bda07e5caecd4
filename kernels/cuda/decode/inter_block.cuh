// How blocks of one launch hand each other numbers without a barrier: each number lies beside a tag in a word of 8 bytes that is written
// and read in one piece, and a reader reads again until the tag is the one that it waits for. From one block's store to another's
// load it is the way to the second-level cache and back; a barrier takes that way three times.
//
// Tags: a launch counts on from where the last one ended, so that no word holds the tag of a write to come; a memory that only this
//       kernel writes, zero at first, keeps them. Tag 0 is not waited for in the first 2^32.
// Order: none is needed between words. A word is written again only by a block that has read what was made, directly or by way of others,
//        from all of its readers' results; and a block writes its results after __syncthreads, behind which all its reads are done.
// All blocks must be on the GPU at once: at most one for each multiprocessor, of which each can hold one. A plain launch is then
// enough: whatever still runs beside it, of the kernel before or of another process, waits for none of these blocks and ends.
#pragma once

#include "vectors.cuh"

using Word = unsigned long long;

inline void store_word(Word* address, Word word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

inline void store_two_words(Word* address, Word first, Word second) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(first), "l"(second) : "memory");
}

inline void load_two_words(Word& first, Word& second, const Word* address) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(address) : "memory");
}

inline Word load_word(const Word* address) {
    Word word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}

inline void publish(Word* address, unsigned bits, unsigned tag) { store_word(address, (Word)tag << 32 | bits); }
inline void publish(Word* address, float value, unsigned tag) { publish(address, __float_as_uint(value), tag); }
inline void publish_two(Word* address, float first, float second, unsigned tag) {  // at a multiple of 16 bytes
    store_two_words(address, (Word)tag << 32 | __float_as_uint(first), (Word)tag << 32 | __float_as_uint(second));
}

// COUNT numbers of 32 bits, at a multiple of 16 bytes but where COUNT is 1; whether all of them have come.
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
    bool come = true;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        come = come && (unsigned)(word[i] >> 32) == tag;
        to[i] = (unsigned)word[i];
    }
    return come;
}

template <int COUNT>
bool load_published(float (&to)[COUNT], const Word* address, unsigned tag) {
    unsigned bits[COUNT];
    const bool come = load_published(bits, address, tag);
#pragma unroll
    for (int i = 0; i < COUNT; i++) to[i] = __uint_as_float(bits[i]);
    return come;
}

// The count of launches' tags, and of the blocks that have read it.
struct Tags {
    unsigned* memory;  // [2]: the last launch's last tag, blocks that have read it
    unsigned base;

    // All threads of a block, which meet here.
    explicit Tags(unsigned* memory_) : memory(memory_), base(*(volatile unsigned*)memory_) {
        __syncthreads();  // all threads have read the count
        if (threadIdx.x == 0) {
            __threadfence();  // before this is seen
            atomicAdd(memory + 1, 1);
        }
    }
    // A launch's tags are 1 to `used`, behind what was before. Block 0's first thread counts them when all blocks have read the count.
    unsigned of(int number) const { return base + number; }
    void end(int used) const {
        if (blockIdx.x > 0 || threadIdx.x > 0) return;
        while (*(volatile unsigned*)(memory + 1) < gridDim.x) {}
        __threadfence();  // the reads are before the new count
        memory[0] = base + used;
        memory[1] = 0;
    }
};
