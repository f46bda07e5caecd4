// The product of a few rows with a weight matrix, as decoding makes it: the weight is read once, and its bytes are all that counts.
//
//     out[r, o] = sum over i of inp[r, i] * weight[o, i] (+ bias[o])
//
// Layout: inp (ROWS, inputs), weight (outputs, inputs), bias (outputs,) or null, out (ROWS, outputs), all of T.
// Work: a warp owns one output for all rows; its lanes step through the inputs in vectors of SIZE, 32 vectors at a time.
// Precision: fp32 products and sums, one rounding to T. Determinism: every sum has a fixed order.

#include "reduce.cuh"

template <typename T, int SIZE, int ROWS>
__global__ void __launch_bounds__(128) matmul_rows(T* out, const T* inp, const T* weight, const T* bias, int outputs, int inputs) {
    using Part = Vector<T, SIZE>;
    const int output = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (output >= outputs) return;
    const T* const row = weight + (long long)output * inputs;  // 50304 x 12288 is below 2^31, more is not
    float sums[ROWS] = {};
#pragma unroll 4  // loads in flight
    for (int i = lane * SIZE; i < inputs; i += WARP * SIZE) {
        const Part w = *reinterpret_cast<const Part*>(row + i);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const Part x = *reinterpret_cast<const Part*>(inp + r * inputs + i);
#pragma unroll
            for (int j = 0; j < SIZE; j++) sums[r] += to_float(x.element[j]) * to_float(w.element[j]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float sum = warp_reduce(sums[r], Sum());
        if (lane == 0) out[r * outputs + output] = from_float<T>(sum + (bias ? to_float(bias[output]) : 0.0f));
    }
}
