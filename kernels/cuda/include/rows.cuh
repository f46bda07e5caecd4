// A row of activations in the registers of the threads that own it, for operations that pass over a row more than once.
//
// blockDim.x threads own a row: one warp (then a block may own several rows, one to each threadIdx.y) or a whole block
// (blockDim.y is 1). A thread holds VECTORS vectors of SIZE elements, each blockDim.x vectors from the one before, so that a warp
// reads without gaps. What lies beyond the row is held as zero.
#pragma once

#include "copies.cuh"
#include "vectors.cuh"

// First column of a thread's v-th vector.
template <int SIZE>
int row_column(int v) {
    return (threadIdx.x + v * blockDim.x) * SIZE;
}

// A thread's v-th vector of a row.
template <int SIZE, typename T>
Packed<T, SIZE> load_vector(const T* row, int v, int dim) {
    Packed<T, SIZE> found;
    found.clear();
    if (row_column<SIZE>(v) < dim) found.load(row + row_column<SIZE>(v));
    return found;
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
        for (int v = 0; v < VECTORS; v++) part[v] = load_vector<SIZE>(row, v, dim);
    }

    void store(T* row, int dim) const {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (row_column<SIZE>(v) < dim) part[v].store(row + row_column<SIZE>(v));
    }
};

// Loads stay on their side of it: what is read again is loaded again, and a vector not before the one before is done with, as there
// are no registers to hold them. The assembler, which knows nothing of it, keeps to it where it is STRICT, a barrier of the warp.
template <bool STRICT = false>
void separate_loads() {
    if constexpr (STRICT) __syncwarp();
    else asm volatile("" ::: "memory");
}

// Start to copy a thread's vectors of a row to the same places of a row in shared memory.
template <int SIZE, int VECTORS, typename T>
void copy_row(T* to, const T* row, int dim) {
    constexpr int BYTES = SIZE * sizeof(T);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int column = row_column<SIZE>(v);
        if (column >= dim) continue;
        if constexpr (BYTES == 16) {
            cp_async(shared_address(to + column), row + column, true);
        } else if constexpr (BYTES == 32) {
            cp_async_ca(shared_address(to + column), row + column);
            cp_async_ca(shared_address(to + column + SIZE / 2), row + column + SIZE / 2);
        } else {
            to[column] = row[column];
        }
    }
}

// The rows of the stream and of ARRAYS arrays of T that a warp or block works on one after the other, gridDim.x * blockDim.y
// apart, on their way to shared memory while an earlier one is worked on: to ask for a row only when the one before is done would
// leave the memory idle meanwhile. A thread copies and reads its own vectors alone, so that no barrier is needed.
template <typename T, int SIZE, int VECTORS, int ARRAYS>
struct RowQueue {
    const float* stream_from;
    const T* from[ARRAYS];  // null for an array that there is not
    float* stream_held;     // (stages, dim), this threadIdx.y's
    T* held;                // (stages, ARRAYS, dim)
    int row, rows, dim, stages, stage;

    // `shared`: (blockDim.y, stages, dim) floats, then (blockDim.y, stages, ARRAYS, dim) elements of T. stages: 1 or 2, the rows that
    // are there or on their way.
    RowQueue(float4* shared, const float* stream, const T* const (&arrays)[ARRAYS], int rows, int dim, int stages)
        : stream_from(stream), row(blockIdx.x * blockDim.y + threadIdx.y), rows(rows), dim(dim), stages(stages), stage(0) {
        float* const floats = reinterpret_cast<float*>(shared);
        stream_held = floats + threadIdx.y * stages * dim;
        held = reinterpret_cast<T*>(floats + blockDim.y * stages * dim) + threadIdx.y * stages * ARRAYS * dim;
#pragma unroll
        for (int a = 0; a < ARRAYS; a++) from[a] = arrays[a];
        fetch(row);
        if (stages == 1) return;
        stage = 1;
        fetch(row + step());
        stage = 0;
    }

    static int step() { return gridDim.x * blockDim.y; }

    void fetch(int next) {
        if (next < rows) {
            const long long start = (long long)next * dim;
            copy_row<SIZE, VECTORS>(stream_held + stage * dim, stream_from + start, dim);
#pragma unroll
            for (int a = 0; a < ARRAYS; a++)
                if (from[a]) copy_row<SIZE, VECTORS>(held + (stage * ARRAYS + a) * dim, from[a] + start, dim);
        }
        cp_async_commit();  // also where there is nothing to copy: the waits count groups
    }

    // Until `row` is there.
    void wait() const {
        if (stages == 1) cp_async_wait<0>();
        else cp_async_wait<1>();
    }

    // The thread's v-th vector of the stream's `row`, and of array a's; zeros where there is no such array.
    Packed<float, SIZE> stream(int v) const { return load_vector<SIZE>(stream_held + stage * dim, v, dim); }
    Packed<T, SIZE> get(int a, int v) const {
        return load_vector<SIZE>(held + (stage * ARRAYS + a) * dim, v, from[a] ? dim : 0);
    }

    // On to the next row; what this one lay in is overwritten.
    void next() {
        fetch(row + stages * step());
        row += step();
        stage ^= stages - 1;
    }
};

// The stream's row of a queue with array 0's and `bias` added, which is then stored as the stream's next; as it is where there is
// no array 0. bias (dim,), from the first-level cache, or null.
template <typename T, int SIZE, int VECTORS>
Row<float, SIZE, VECTORS> next_stream(const RowQueue<T, SIZE, VECTORS, 1>& queue, float* residual_out, const float* bias) {
    Row<float, SIZE, VECTORS> x;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) x.part[v] = queue.stream(v);
    if (!queue.from[0]) return x;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        separate_loads();
        const auto step = queue.get(0, v);
        const auto shift = load_vector<SIZE>(bias, v, bias ? queue.dim : 0);
        x.part[v].set([&](int j) { return x(v, j) + (step(j) + shift(j)); });
    }
    x.store(residual_out + (long long)queue.row * queue.dim, queue.dim);
    return x;
}

// Sum over the row of a value per thread. All threads that own the row call it and get the result.
inline float row_sum(float value) {
    return blockDim.x == WARP ? warp_reduce(value, Sum()) : block_reduce(value, Sum(), 0.0f);
}

// Two such sums; a warp's take their steps together, so that one's latency covers the other's.
inline float2 row_sums(float a, float b) {
    if (blockDim.x != WARP) {
        a = block_reduce(a, Sum(), 0.0f);
        return make_float2(a, block_reduce(b, Sum(), 0.0f));
    }
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const float other_a = __shfl_xor_sync(ALL_LANES, a, offset), other_b = __shfl_xor_sync(ALL_LANES, b, offset);
        a += other_a, b += other_b;
    }
    return make_float2(a, b);
}

// A thread's sums for its columns over the rows that it saw, (VECTORS, SIZE), to the block's row of an array of `partial`, each of
// which is (gridDim.x, dim). Where warps own rows, `warp_partials`, shared memory of (blockDim.y, dim) floats, holds what is added up in
// their order; it may be a RowQueue's that has come to its end.
template <int SIZE, int VECTORS>
void store_column_sums(float* partial, int array, float* warp_partials, const float (&sums)[VECTORS][SIZE], int dim) {
    float* const row = partial + (long long)(array * gridDim.x + blockIdx.x) * dim;
    float* const mine = blockDim.y == 1 ? row : warp_partials + threadIdx.y * dim;
    __syncthreads();  // separates these writes from the reads of an earlier call and of a queue
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int j = 0; j < SIZE; j++)
            if (row_column<SIZE>(v) < dim) mine[row_column<SIZE>(v) + j] = sums[v][j];
    if (blockDim.y == 1) return;
    __syncthreads();  // the warps' sums, written above, are read below by all
    for (int i = threadIdx.y * WARP + threadIdx.x; i < dim; i += blockDim.y * WARP) {
        float sum = 0.0f;
        for (int warp = 0; warp < blockDim.y; warp++) sum += warp_partials[warp * dim + i];
        row[i] = sum;
    }
}
