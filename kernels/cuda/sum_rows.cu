// Adds the rows of partial sums to a parameter's gradient: the second pass of every gradient that sums over
// all positions.
//
//     out[i] += sum over r < rows of partial[0, r, i]
//     second and third likewise, from partial[1] and partial[2], if gridDim.y is 2 or 3
//
// Layout: partial (gridDim.y, rows, columns) and out, second, third (columns,), all fp32.
// Work: a block of 32 x 32 threads owns 32 columns of one array. Warp w sums the rows w, w + 32, ..., a lane
//       per column. Warp c then reduces the 32 partial sums of column c.
// Determinism: a fixed order: every 32nd row in sequence, then the warp's reduction tree.

#include "reduce.cuh"

__global__ void __launch_bounds__(1024)
    add_rows(float* out, float* second, float* third, const float* partial, int rows, int columns) {
    __shared__ float sums[WARP][WARP + 1];  // padded: a column's elements lie in different banks
    const float* const src = partial + (long long)blockIdx.y * rows * columns;
    float* const dst = blockIdx.y == 0 ? out : blockIdx.y == 1 ? second : third;
    const int first_column = blockIdx.x * WARP, column = first_column + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int row = threadIdx.y; row < rows; row += WARP) sum += src[(long long)row * columns + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // separates the writes of sums from the transposed reads
    sum = warp_reduce(sums[threadIdx.x][threadIdx.y], Sum());
    if (threadIdx.x == 0 && first_column + threadIdx.y < columns) dst[first_column + threadIdx.y] += sum;
}
