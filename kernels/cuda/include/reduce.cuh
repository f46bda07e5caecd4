// Sums and maxima over a warp and over a block, the element types' conversions, and the exponential.
//
// Every thread of the warp or block takes part and gets the result. The order of a sum is fixed by the thread numbers, so it
// repeats bit for bit.
#pragma once

#include <cuda_bf16.h>

using bf16 = __nv_bfloat16;

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return __bfloat162float(x); }

template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) { return x; }
template <>
inline bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

// e^x to some 2 + |x| units in the last place, as x log2(e) is rounded; 0 where that is no normal number, which __expf takes three instructions more to keep.
inline float exponential(float x) {
    constexpr float LOG2_E = 1.4426950408889634f;
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * LOG2_E));
    return power;
}

struct Sum {
    template <typename T>
    T operator()(T a, T b) const { return a + b; }
};

struct Max {
    float operator()(float a, float b) const { return fmaxf(a, b); }
};

// All 32 lanes must call it.
template <typename Op, typename T>
T warp_reduce(T value, Op op) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
}

// All threads of a block of whole warps must call it. `identity` is what the op leaves a value unchanged with.
template <typename Op, typename T>
T block_reduce(T value, Op op, T identity) {
    __shared__ T warp_partials[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    value = warp_reduce(value, op);
    __syncthreads();  // separates these writes from the reads of an earlier call
    if (lane == 0) warp_partials[warp] = value;
    __syncthreads();  // the warps' results, written above, are read below by all
    value = lane < blockDim.x / WARP ? warp_partials[lane] : identity;
    return warp_reduce(value, op);
}

// SIZE elements that one instruction loads or stores: 16 bytes at most, at an address that is a multiple of them.
template <typename T, int SIZE>
struct alignas(sizeof(T) * SIZE) Vector {
    T element[SIZE];
};
