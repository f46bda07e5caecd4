// Reductions over a warp and over a block, conversions between element types, and the exponential.
//
// Every thread of the warp or block must call a reduction, and every thread gets the result. The order of a
// sum depends only on the thread indices, so results are bitwise reproducible.
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

// e^x with an error of about 2 + |x| ulp, because x log2(e) is rounded. Subnormal results are flushed to 0.
// (__expf keeps them, at the cost of three more instructions.)
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
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        value = op(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
}

// All threads of the block must call it; the block consists of whole warps. `identity`: op(x, identity) == x.
template <typename Op, typename T>
T block_reduce(T value, Op op, T identity) {
    __shared__ T warp_partials[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    value = warp_reduce(value, op);
    __syncthreads();  // WAR: separates the writes below from the reads of an earlier call
    if (lane == 0) warp_partials[warp] = value;
    __syncthreads();  // RAW: every thread reads the per-warp results written above
    value = lane < blockDim.x / WARP ? warp_partials[lane] : identity;
    return warp_reduce(value, op);
}

// SIZE elements that one instruction loads or stores: at most 16 bytes, aligned to their size.
template <typename T, int SIZE>
struct alignas(sizeof(T) * SIZE) Vector {
    T element[SIZE];
};
