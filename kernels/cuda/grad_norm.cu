// The length of the whole gradient, by which it is clipped.
//
//     out = sqrt(sum of grads^2)
//
// Layout: grads fp32 (size,), beginning at a multiple of 16 bytes; partial fp32, one for each CHUNK elements; out fp64 ().
// Work: square_sums: a block owns a chunk, which is whole but for the last. grad_norm_finish: one block adds the chunks.
// Precision: fp32 within a chunk, fp64 across. What is not finite stays so.
// Determinism: chunks have a fixed size and sums a fixed order, whatever the GPU.

#include "reduce.cuh"

constexpr int CHUNK_BLOCK = 256, VECTORS_A_THREAD = 16, SIZE = 4;
constexpr int CHUNK = CHUNK_BLOCK * VECTORS_A_THREAD * SIZE;

__global__ void __launch_bounds__(CHUNK_BLOCK) square_sums(float* partial, const float* grads, long long size) {
    const long long start = (long long)blockIdx.x * CHUNK;  // 124 million parameters fit an int, 2.2 billion do not
    float sum = 0.0f;
    if (start + CHUNK <= size) {
        const auto* vectors = reinterpret_cast<const Vector<float, SIZE>*>(grads + start);
#pragma unroll
        for (int i = 0; i < VECTORS_A_THREAD; i++) {
            const auto v = vectors[i * CHUNK_BLOCK + threadIdx.x];
#pragma unroll
            for (int j = 0; j < SIZE; j++) sum += v.element[j] * v.element[j];
        }
    } else {
        for (long long i = start + threadIdx.x; i < size; i += CHUNK_BLOCK) sum += grads[i] * grads[i];
    }
    sum = block_reduce(sum, Sum(), 0.0f);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void grad_norm_finish(double* out, const float* partial, int chunks) {
    double sum = 0.0;
#pragma unroll 8  // loads in flight: one block has to hide the memory's latency alone
    for (int i = threadIdx.x; i < chunks; i += blockDim.x) sum += partial[i];
    sum = block_reduce(sum, Sum(), 0.0);
    if (threadIdx.x == 0) *out = sqrt(sum);
}
