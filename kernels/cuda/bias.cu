// The bias of a linear layer.
//
//     out = inp + bias, row by row                      dbias += sum over rows of dout
//
// Layout: out, inp, dout (rows, columns) and bias (columns,) of T; dbias (columns,) fp32.
// Work: forward, a thread owns a vector of SIZE elements. Backward, a block of 32 x 16 threads owns 32 vectors of columns; its
//       warps and those of the gridDim.y blocks beside it take the rows in turns, a warp several at once, as it is the bytes on
//       their way that fill the memory's time. The warps' sums go to the block's part of its row of `partial` (gridDim.y,
//       columns), which columns.cu adds up.
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
__global__ void __launch_bounds__(512, 2) bias_backward(float* partial, const T* dout, int rows, int columns) {
    constexpr int WARPS = 16, UNDER_WAY = 8;  // a block's, and vectors that a thread waits for at once; not tuned
    __shared__ float warp_partials[WARPS][WARP * SIZE];
    const int first = blockIdx.x * WARP * SIZE, column = first + threadIdx.x * SIZE, step = gridDim.y * WARPS;
    float sum[SIZE] = {};
    if (column < columns)
        for (int row = blockIdx.y * WARPS + threadIdx.y; row < rows; row += step * UNDER_WAY) {
            Packed<T, SIZE> d[UNDER_WAY];
#pragma unroll
            for (int i = 0; i < UNDER_WAY; i++) {
                d[i].clear();
                if (row + i * step < rows) d[i].load(dout + (long long)(row + i * step) * columns + column);
            }
#pragma unroll
            for (int i = 0; i < UNDER_WAY; i++)
#pragma unroll
                for (int j = 0; j < SIZE; j++) sum[j] += d[i](j);
        }
#pragma unroll
    for (int j = 0; j < SIZE; j++) warp_partials[threadIdx.y][threadIdx.x * SIZE + j] = sum[j];
    __syncthreads();  // the warps' sums, written above, are read below by all
    for (int i = threadIdx.y * WARP + threadIdx.x; i < WARP * SIZE && first + i < columns; i += WARPS * WARP) {
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) total += warp_partials[warp][i];
        partial[(long long)blockIdx.y * columns + first + i] = total;
    }
}
