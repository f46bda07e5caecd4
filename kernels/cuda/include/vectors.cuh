// Vectorized loads and stores: SIZE neighbouring elements, 16 bytes per instruction at a 16-byte-aligned
// address, or a single element. The launcher picks SIZE (kernels/cuda/runtime/vectors.py).
#pragma once

#include "reduce.cuh"

// Two floats rounded to bf16: `lower` in the low 16 bits.
inline unsigned pack(float lower, float upper) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(lower, upper);
    return *reinterpret_cast<const unsigned*>(&both);
}

// SIZE elements held as 32-bit words. A word holds two bf16, the first in its low half, so unpacking is a
// shift or a mask. (With a struct of bf16 the compiler sometimes keeps each element in a register of its
// own.)
template <typename T, int SIZE>
struct Packed {
    static constexpr int BYTES = SIZE * sizeof(T);
    static constexpr int WORDS = BYTES < sizeof(unsigned) ? 1 : BYTES / sizeof(unsigned);
    static_assert(BYTES % 16 == 0 || SIZE == 1);
    unsigned word[WORDS];

    float operator()(int j) const {
        if constexpr (sizeof(T) == sizeof(float)) return __uint_as_float(word[j]);
        else return __uint_as_float(j % 2 ? word[j / 2] & 0xffff0000u : word[j / 2] << 16);
    }

    // Set each element j to value(j), rounded to T.
    template <typename F>
    void set(F value) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            if constexpr (sizeof(T) == sizeof(float)) word[i] = __float_as_uint(value(i));
            else word[i] = pack(value(2 * i), SIZE == 1 ? 0.0f : value(2 * i + 1));
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
                const uint4 words = reinterpret_cast<const uint4*>(address)[i / 4];
                word[i] = words.x, word[i + 1] = words.y, word[i + 2] = words.z, word[i + 3] = words.w;
            }
        } else if constexpr (BYTES == sizeof(unsigned)) {
            word[0] = *reinterpret_cast<const unsigned*>(address);
        } else {
            word[0] = *reinterpret_cast<const unsigned short*>(address);
        }
    }

    void store(T* address) const {
        // __stwb, because the compiler sometimes splits an ordinary uint4 store into four.
        if constexpr (BYTES % 16 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                __stwb(reinterpret_cast<uint4*>(address) + i / 4,
                       make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]));
        } else if constexpr (BYTES == sizeof(unsigned)) *reinterpret_cast<unsigned*>(address) = word[0];
        else *reinterpret_cast<unsigned short*>(address) = (unsigned short)word[0];
    }
};

// SIZE floats: 4 or 8 at a 16-byte-aligned address, or 1.
template <int SIZE>
void load_floats(float (&to)[SIZE], const float* address) {
    constexpr int VEC = SIZE == 1 ? 1 : 4;
#pragma unroll
    for (int i = 0; i < SIZE / VEC; i++) {
        Packed<float, VEC> vec;
        vec.load(address + i * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) to[i * VEC + j] = vec(j);
    }
}

template <int SIZE>
void store_floats(float* address, const float (&from)[SIZE]) {
    constexpr int VEC = SIZE == 1 ? 1 : 4;
#pragma unroll
    for (int i = 0; i < SIZE / VEC; i++) {
        Packed<float, VEC> vec;
        vec.set([&](int j) { return from[i * VEC + j]; });
        vec.store(address + i * VEC);
    }
}
