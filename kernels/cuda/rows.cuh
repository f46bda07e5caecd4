// A row of activations in the registers of the threads that own it, for operations that pass over a row more than once.
//
// blockDim.x threads own a row: one warp (then a block may own several rows, one to each threadIdx.y) or a whole block
// (blockDim.y is 1). A thread holds VECTORS vectors of SIZE elements, each blockDim.x vectors from the one before, so that a warp
// reads without gaps. What lies beyond the row is held as zero.
#pragma once

#include "vectors.cuh"

// First column of a thread's v-th vector.
template <int SIZE>
int row_column(int v) {
    return (threadIdx.x + v * blockDim.x) * SIZE;
}

template <typename T, int SIZE, int VECTORS>
struct Row {
    Packed<T, SIZE> part[VECTORS];

    float operator()(int v, int j) const { return part[v](j); }

    // Set each element (v, j) to of(v, j), rounded to T.
    template <typename F>
    void set(F of) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) part[v].set([&](int j) { return of(v, j); });
    }

    void load(const T* row, int dim) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            part[v].clear();
            if (row_column<SIZE>(v) < dim) part[v].load(row + row_column<SIZE>(v));
        }
    }

    // As load, but that the compiler does not keep what was loaded before instead.
    void load_again(const T* row, int dim) {
        asm volatile("" : "+l"(row));
        load(row, dim);
    }

    void store(T* row, int dim) const {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (row_column<SIZE>(v) < dim) part[v].store(row + row_column<SIZE>(v));
    }

    // Has no effect but that what was computed from the elements before is computed again after: the compiler would hold each
    // of them as fp32 across a loop or a reduction, in twice the registers.
    void keep_packed() {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int i = 0; i < Packed<T, SIZE>::WORDS; i++) asm volatile("" : "+r"(part[v].word[i]));
    }
};

// Sum over the row of a value per thread. All threads that own the row call it and get the result.
inline float row_sum(float value) {
    return blockDim.x == WARP ? warp_reduce(value, Sum()) : block_reduce(value, Sum(), 0.0f);
}

// A thread's sums for its columns over the rows that it saw, (VECTORS, SIZE), to the block's row of `partial` (gridDim.x, dim).
// Where warps own rows, `of_warp`, shared memory of (blockDim.y, dim) floats, holds what is added up in their order.
template <int SIZE, int VECTORS>
void store_column_sums(float* partial, float* of_warp, const float (&sums)[VECTORS][SIZE], int dim) {
    float* const row = partial + (long long)blockIdx.x * dim;
    float* const mine = blockDim.y == 1 ? row : of_warp + threadIdx.y * dim;
    __syncthreads();  // separates these writes from the reads of an earlier call
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int j = 0; j < SIZE; j++)
            if (row_column<SIZE>(v) < dim) mine[row_column<SIZE>(v) + j] = sums[v][j];
    if (blockDim.y == 1) return;
    __syncthreads();  // the warps' sums, written above, are read below by all
    for (int i = threadIdx.y * WARP + threadIdx.x; i < dim; i += blockDim.y * WARP) {
        float sum = 0.0f;
        for (int warp = 0; warp < blockDim.y; warp++) sum += of_warp[warp * dim + i];
        row[i] = sum;
    }
}
