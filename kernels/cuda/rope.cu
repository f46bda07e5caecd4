// Rotary position embedding of queries and keys, in place. The backward pass rotates by the opposite angle.
//
//     a' = a cos - b sin        b' = a sin + b cos        for each pair (a, b) = (i, i + D / 2) of a head
//
// Layout: qkv (rows, heads, D) of T, rows = B * length. The first `rotated` heads are the queries and keys.
//         start (rows,) int; position = t - start.
//         table (context, 2, width) fp32, cos and sin. The kernel uses the first D / 2 columns.
// Work: a thread owns SIZE pairs in up to HEADS heads of a row. These heads lie `groups` apart: a warp's
//       loads are then contiguous, and the thread loads its angles once.
// Precision: fp32 arithmetic, one rounding to T at the store.
// Determinism: pairs are independent.
// Source: Su et al. 2021, arXiv:2104.09864, in the two-halves order of the Llama models.

#include "vectors.cuh"

// count: threads with work, rows * groups * (D / 2 / SIZE), below 2^31. Element offsets may pass 2^31 and are
// long long. direction: 1 forward, -1 backward. groups: rotated / HEADS, rounded up.
template <typename T, int SIZE, int HEADS>
__global__ void __launch_bounds__(256)
    rope_rotate(T* qkv, const int* start, const float* table, int count, int length, int heads, int head_dim,
                int width, int rotated, int groups, float direction) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int half = head_dim / 2, vectors = half / SIZE;
    const int column = i % vectors * SIZE, group = i / vectors % groups, row = i / vectors / groups;
    const float* const angles = table + (long long)(row % length - start[row]) * 2 * width + column;
    float cosine[SIZE], sine[SIZE];
    load_floats(cosine, angles);
    load_floats(sine, angles + width);
#pragma unroll
    for (int j = 0; j < SIZE; j++) sine[j] *= direction;
    T* const row_pairs = qkv + (long long)row * heads * head_dim + column;
    Packed<T, SIZE> a[HEADS], b[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        if (group + h * groups < rotated) {
            a[h].load(row_pairs + (group + h * groups) * head_dim);
            b[h].load(row_pairs + (group + h * groups) * head_dim + half);
        }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (group + h * groups >= rotated) return;
        Packed<T, SIZE> rotated_a, rotated_b;
        rotated_a.set([&](int j) { return a[h](j) * cosine[j] - b[h](j) * sine[j]; });
        rotated_b.set([&](int j) { return a[h](j) * sine[j] + b[h](j) * cosine[j]; });
        rotated_a.store(row_pairs + (group + h * groups) * head_dim);
        rotated_b.store(row_pairs + (group + h * groups) * head_dim + half);
    }
}
