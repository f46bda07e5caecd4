// SIZE neighbouring elements that are loaded and stored 16 bytes at a time, at an address that is a multiple of 16, or one element:
// the launcher picks SIZE so (kernels/cuda/vectors.py).
#pragma once

#include "reduce.cuh"

inline unsigned pack(float lower, float upper) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(lower, upper);
    return *reinterpret_cast<const unsigned*>(&both);
}

// Held as 32-bit words, two elements of bf16 to each, the first in the lower half: unpacking is a shift or a mask. (Of a struct of
// bf16 the compiler at times holds each element in a register of its own.)
template <typename T, int SIZE>
struct Packed {
    static constexpr int BYTES = SIZE * sizeof(T), WORDS = BYTES < sizeof(unsigned) ? 1 : BYTES / sizeof(unsigned);
    static_assert(BYTES % 16 == 0 || SIZE == 1);
    unsigned word[WORDS];

    float operator()(int j) const {
        if constexpr (sizeof(T) == sizeof(float)) return __uint_as_float(word[j]);
        else return __uint_as_float(j % 2 ? word[j / 2] & 0xffff0000u : word[j / 2] << 16);
    }

    // Set each element j to of(j), rounded to T.
    template <typename F>
    void set(F of) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            if constexpr (sizeof(T) == sizeof(float)) word[i] = __float_as_uint(of(i));
            else word[i] = pack(of(2 * i), SIZE == 1 ? 0.0f : of(2 * i + 1));
        }
    }

    void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; i++) word[i] = 0;
    }

    void load(const T* address) {
        if constexpr (BYTES % 16 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                const uint4 four = reinterpret_cast<const uint4*>(address)[i / 4];
                word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
            }
        } else if constexpr (BYTES == sizeof(unsigned)) {
            word[0] = *reinterpret_cast<const unsigned*>(address);
        } else {
            word[0] = *reinterpret_cast<const unsigned short*>(address);
        }
    }

    void store(T* address) const {
        // An ordinary store of four words is at times split into four.
        if constexpr (BYTES % 16 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                __stwb(reinterpret_cast<uint4*>(address) + i / 4, make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]));
        } else if constexpr (BYTES == sizeof(unsigned)) *reinterpret_cast<unsigned*>(address) = word[0];
        else *reinterpret_cast<unsigned short*>(address) = (unsigned short)word[0];
    }
};

// SIZE floats (1, 4 or 8) at a multiple of 16 bytes, or of 4 where SIZE is 1.
template <int SIZE>
void load_floats(float (&to)[SIZE], const float* address) {
    constexpr int PART = SIZE == 1 ? 1 : 4;
#pragma unroll
    for (int i = 0; i < SIZE / PART; i++) {
        Packed<float, PART> part;
        part.load(address + i * PART);
#pragma unroll
        for (int j = 0; j < PART; j++) to[i * PART + j] = part(j);
    }
}

template <int SIZE>
void store_floats(float* address, const float (&from)[SIZE]) {
    constexpr int PART = SIZE == 1 ? 1 : 4;
#pragma unroll
    for (int i = 0; i < SIZE / PART; i++) {
        Packed<float, PART> part;
        part.set([&](int j) { return from[i * PART + j]; });
        part.store(address + i * PART);
    }
}
