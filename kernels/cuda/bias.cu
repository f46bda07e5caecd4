// The bias of a linear layer.
//
//     out = inp + bias, row by row                      dbias += sum over rows of dout
//
// Layout: out, inp, dout (rows, columns) and bias (columns,) of T; dbias (columns,) fp32.
// Work, forward: a thread owns a vector of SIZE elements.
// Work, backward: a block of 32 x 16 threads owns 32 vectors of columns, and blockIdx.y selects a subset of
//       rows. A warp loads several rows at once to hide memory latency, and sums them in registers.
//       The block adds its warps' sums and stores one row of `partial` (gridDim.y, columns).
//       sum_rows.cu then adds the rows of `partial` to dbias.
// Precision: fp32 arithmetic, one rounding to T at the store.
// Determinism: every sum has a fixed order; no atomics.

#include "vectors.cuh"

// out may be inp. count: the number of vectors, below 2^32. Element offsets may pass 2^31 and are long long.
// row_vectors: columns / SIZE.
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
__global__ void __launch_bounds__(512, 2)
    bias_backward(float* partial, const T* dout, int rows, int columns) {
    constexpr int WARPS = 16;           // per block
    constexpr int LOADS_IN_FLIGHT = 8;  // vectors that a thread loads before it sums them; not tuned
    __shared__ float warp_partials[WARPS][WARP * SIZE];
    const int first_column = blockIdx.x * WARP * SIZE, column = first_column + threadIdx.x * SIZE;
    const int row_stride = gridDim.y * WARPS;
    float sum[SIZE] = {};
    if (column < columns)
        for (int row = blockIdx.y * WARPS + threadIdx.y; row < rows; row += row_stride * LOADS_IN_FLIGHT) {
            Packed<T, SIZE> d[LOADS_IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < LOADS_IN_FLIGHT; i++) {
                d[i].clear();
                if (row + i * row_stride < rows)
                    d[i].load(dout + (long long)(row + i * row_stride) * columns + column);
            }
#pragma unroll
            for (int i = 0; i < LOADS_IN_FLIGHT; i++)
#pragma unroll
                for (int j = 0; j < SIZE; j++) sum[j] += d[i](j);
        }
#pragma unroll
    for (int j = 0; j < SIZE; j++) warp_partials[threadIdx.y][threadIdx.x * SIZE + j] = sum[j];
    __syncthreads();  // separates the warps' writes of warp_partials from all threads' reads
    const int thread = threadIdx.y * WARP + threadIdx.x;
    for (int i = thread; i < WARP * SIZE && first_column + i < columns; i += WARPS * WARP) {
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) total += warp_partials[warp][i];
        partial[(long long)blockIdx.y * columns + first_column + i] = total;
    }
}
