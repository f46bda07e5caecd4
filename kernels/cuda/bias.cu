// The bias of a linear layer.
//
//     out = inp + bias, row by row                      dbias += sum over rows of dout
//
// Layout: out, inp, dout (rows, columns) and bias (columns,) of T; dbias (columns,) fp32.
// Work: forward, a thread owns a vector of SIZE elements. Backward, a block of 32 x 8 threads owns 32 vectors of columns and a
//       stretch of rows; each of its warps sums every 8th of them, and the warps' sums go to the block's part of its row of
//       `partial` (gridDim.y, columns), which columns.cu adds up.
// Precision: fp32 arithmetic, one rounding to T at the store. Determinism: every sum has a fixed order; no atomics.

#include "vectors.cuh"

// out may be inp. count: of vectors, below 2^32; elements beyond 2^31 are reached by long long. row_vectors: columns / SIZE.
template <typename T, int SIZE>
__global__ void __launch_bounds__(256)
    bias_forward(T* out, const T* inp, const T* bias, unsigned count, unsigned row_vectors) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    Packed<T, SIZE> x, b;
    x.load(inp + (long long)i * SIZE);
    b.load(bias + i % row_vectors * SIZE);
    x.set([&](int j) { return x(j) + b(j); });
    x.store(out + (long long)i * SIZE);
}

template <typename T, int SIZE>
__global__ void __launch_bounds__(256) bias_backward(float* partial, const T* dout, int rows, int columns, int block_rows) {
    constexpr int WARPS = 8, UNROLL = 4;
    __shared__ float of_warp[WARPS][WARP * SIZE];
    const int first = blockIdx.x * WARP * SIZE, column = first + threadIdx.x * SIZE;
    const int begin = blockIdx.y * block_rows, end = min(rows, begin + block_rows);
    float sum[SIZE] = {};
    if (column < columns) {
#pragma unroll UNROLL
        for (int row = begin + threadIdx.y; row < end; row += WARPS) {
            Packed<T, SIZE> d;
            d.load(dout + (long long)row * columns + column);
#pragma unroll
            for (int j = 0; j < SIZE; j++) sum[j] += d(j);
        }
    }
#pragma unroll
    for (int j = 0; j < SIZE; j++) of_warp[threadIdx.y][threadIdx.x * SIZE + j] = sum[j];
    __syncthreads();  // the warps' sums, written above, are read below by all
    for (int i = threadIdx.y * WARP + threadIdx.x; i < WARP * SIZE && first + i < columns; i += WARPS * WARP) {
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) total += of_warp[warp][i];
        partial[(long long)blockIdx.y * columns + first + i] = total;
    }
}
