// Sum over rows of partial sums: the second half of every gradient that is a sum over all positions.
//
//     out[i] += sum over r < rows of partial[0, r, i]      (and so on for second and third, where gridDim.y is 2 or 3)
//
// Layout: partial (gridDim.y, rows, columns) and out, second, third (columns,) fp32.
// Work: a block of 32 x 32 threads owns 32 columns of an array; each of its warps sums every 32nd row, each thread a column. Then
//       warp c adds up the warps' sums of column c.
// Determinism: a fixed order: every 32nd row in order, then the tree of a warp's sum.

#include "reduce.cuh"

__global__ void __launch_bounds__(1024) add_rows(float* out, float* second, float* third, const float* partial, int rows,
                                                 int columns) {
    __shared__ float sums[WARP][WARP + 1];  // one more, so that a column's elements lie in different banks
    const float* const from = partial + (long long)blockIdx.y * rows * columns;
    float* const to = blockIdx.y == 0 ? out : blockIdx.y == 1 ? second : third;
    const int first = blockIdx.x * WARP, column = first + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int row = threadIdx.y; row < rows; row += WARP) sum += from[(long long)row * columns + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // the warps' sums, written above, are read across warps below
    sum = warp_reduce(sums[threadIdx.x][threadIdx.y], Sum());
    if (threadIdx.x == 0 && first + threadIdx.y < columns) to[first + threadIdx.y] += sum;
}
