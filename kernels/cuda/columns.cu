// Sum over rows of partial sums: the second half of every gradient that is a sum over all positions.
//
//     out[i] += sum over r < rows of partial[r, i]      (and the same for a second pair, where gridDim.y is 2)
//
// Layout: partial (rows, columns) and out (columns,) fp32.
// Work: a block of 32 x 32 threads owns 32 columns; each of its warps sums every 32nd row, each thread a column. Then warp c adds
//       up the warps' sums of column c.
// Determinism: a fixed order: every 32nd row in order, then the tree of a warp's sum.

#include "reduce.cuh"

__global__ void __launch_bounds__(1024) add_rows(float* out, const float* partial, float* other_out, const float* other_partial,
                                                 int rows, int columns) {
    __shared__ float sums[WARP][WARP + 1];  // one more, so that a column's elements lie in different banks
    const float* const from = blockIdx.y ? other_partial : partial;
    const int first = blockIdx.x * WARP, column = first + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int row = threadIdx.y; row < rows; row += WARP) sum += from[(long long)row * columns + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // the warps' sums, written above, are read across warps below
    sum = warp_reduce(sums[threadIdx.x][threadIdx.y], Sum());
    if (threadIdx.x == 0 && first + threadIdx.y < columns) (blockIdx.y ? other_out : out)[first + threadIdx.y] += sum;
}
