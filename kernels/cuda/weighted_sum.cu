// The weighted sum of the rows' losses.
//
//     total += sum of weight * nll, over the rows with a nonzero weight
//
// Layout: nll and weight fp32 (rows,), total fp64, 0-d.
// Work: one block; thread t adds the rows t, t + blockDim.x, ...
// Precision: fp64. Each product of two fp32 numbers is exact.
// Determinism: the order of the sum is fixed.

#include "reduce.cuh"

__global__ void weighted_sum_forward(double* total, const float* nll, const float* weight, int rows) {
    double sum = 0.0;
#pragma unroll 8  // eight loads in flight: a single block must hide the memory latency; not tuned
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const float w = weight[i], x = nll[i];
        sum += w == 0.0f ? 0.0 : (double)w * (double)x;  // guards against 0 * infinity = NaN
    }
    sum = block_reduce(sum, Sum(), 0.0);
    if (threadIdx.x == 0) *total += sum;
}
