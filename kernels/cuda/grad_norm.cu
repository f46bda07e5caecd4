// The L2 norm of the whole gradient, for clipping.
//
//     out = sqrt(sum of grads^2)
//
// Layout: grads fp32 (size,), 16-byte aligned; out fp64, 0-d.
//         partial fp32, one element per chunk of CHUNK gradients.
// Work: square_sums: a block owns a chunk. Only the last chunk may be shorter.
//       grad_norm_finish: one block adds the chunks' sums.
// Precision: fp32 within a chunk, fp64 across chunks. A NaN or infinity in grads makes out NaN or infinite.
// Determinism: the chunk size and the order of every sum are fixed, on any GPU.

#include "reduce.cuh"

constexpr int CHUNK_BLOCK = 256, VECTORS_PER_THREAD = 16, SIZE = 4;  // not tuned
constexpr int CHUNK = CHUNK_BLOCK * VECTORS_PER_THREAD * SIZE;

__global__ void __launch_bounds__(CHUNK_BLOCK)
    square_sums(float* partial, const float* grads, long long size) {
    const long long start = (long long)blockIdx.x * CHUNK;  // size passes 2^31 at 2.2 billion parameters
    float sum = 0.0f;
    if (start + CHUNK <= size) {
        const auto* vectors = reinterpret_cast<const Vector<float, SIZE>*>(grads + start);
#pragma unroll
        for (int i = 0; i < VECTORS_PER_THREAD; i++) {
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
#pragma unroll 8  // eight loads in flight: a single block must hide the memory latency; not tuned
    for (int i = threadIdx.x; i < chunks; i += blockDim.x) sum += partial[i];
    sum = block_reduce(sum, Sum(), 0.0);
    if (threadIdx.x == 0) *out = sqrt(sum);
}
