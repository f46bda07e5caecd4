// A barrier across all blocks of a launch, and how blocks read what others wrote before it.
//
// All blocks must be on the GPU at once: at most one for each multiprocessor, of which each can hold one. A plain launch is then
// enough: whatever still runs beside it, of the kernel before or of another process, waits for none of these blocks and ends.
// The counter outlives launches and is never reset: in each round the arrivals add up to 2^31, so that its top bit turns and the
// rest is zero again, however many blocks the next launch has. A block cannot miss a turn, since the next one needs it too.
// Order: what a block's threads wrote before `arrive` is seen after `wait` by all threads of all blocks: __syncthreads, a release
// by one thread, its acquire in the other block, __syncthreads. Reading with load_written besides keeps such data out of the first-level
// cache, which is not coherent: a line that an earlier phase of this launch left there would be an old one.
#pragma once

#include "vectors.cuh"

inline unsigned add_release(unsigned* address, unsigned value) {
    unsigned before;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
}

inline unsigned load_acquire(const unsigned* address) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

struct GridBarrier {
    unsigned* arrivals;
    unsigned before;  // of thread 0: what the counter was

    // All threads of a block must call both, in turn.
    void arrive() {
        __syncthreads();  // the block's writes are before the arrival
        constexpr unsigned ROUND = 1u << 31;
        if (threadIdx.x == 0) before = add_release(arrivals, blockIdx.x == 0 ? ROUND - (gridDim.x - 1) : 1);
    }
    void wait() {
        if (threadIdx.x == 0)
            while ((load_acquire(arrivals) ^ before) >> 31 == 0) {}
        __syncthreads();  // the block's reads are after all arrivals
    }
};

// From the second-level cache.
template <int SIZE, typename T>
Packed<T, SIZE> load_written(const T* address) {
    using Loaded = Packed<T, SIZE>;
    Loaded loaded;
    if constexpr (Loaded::BYTES % 16 == 0) {
        const uint4 four = __ldcg(reinterpret_cast<const uint4*>(address));
        static_assert(Loaded::WORDS == 4);
        loaded.word[0] = four.x, loaded.word[1] = four.y, loaded.word[2] = four.z, loaded.word[3] = four.w;
    } else if constexpr (Loaded::BYTES == sizeof(unsigned)) {
        loaded.word[0] = __ldcg(reinterpret_cast<const unsigned*>(address));
    } else {
        loaded.word[0] = __ldcg(reinterpret_cast<const unsigned short*>(address));
    }
    return loaded;
}

// Where load_written will read.
inline void publish(float* address, float value) { __stcg(address, value); }
inline void publish(bf16* address, bf16 value) {
    __stcg(reinterpret_cast<unsigned short*>(address), *reinterpret_cast<const unsigned short*>(&value));
}
