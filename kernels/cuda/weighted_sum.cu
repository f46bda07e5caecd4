// The sum that a loss is made of.
//
//     total += sum of weight * nll, over the rows whose weight is not 0
//
// Layout: nll and weight fp32 (rows,), total fp64 (). Work: one block; thread t takes the rows t, t + blockDim.x, ...
// Precision: fp64, in which each product is exact. Determinism: the order of the sum is fixed by the thread numbers.

#include "reduce.cuh"

__global__ void weighted_sum_forward(double* total, const float* nll, const float* weight, int rows) {
    double sum = 0.0;
#pragma unroll 8  // loads in flight: one block has to hide the memory's latency alone
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const float w = weight[i], x = nll[i];
        sum += w == 0.0f ? 0.0 : (double)w * (double)x;  // 0 times infinity is NaN
    }
    sum = block_reduce(sum, Sum(), 0.0);
    if (threadIdx.x == 0) *total += sum;
}
