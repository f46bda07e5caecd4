// Rows of activations in registers, for operations that pass over a row more than once.
//
// blockDim.x threads own a row. They are one warp (a block may then own several rows, one per threadIdx.y),
// or a whole block (blockDim.y is 1). A thread holds VECTORS vectors of SIZE elements; consecutive vectors
// are blockDim.x vectors apart, so accesses are coalesced. Elements past the end of the row are held as
// zero.
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
    Packed<T, SIZE> vec;
    vec.clear();
    if (row_column<SIZE>(v) < dim) vec.load(row + row_column<SIZE>(v));
    return vec;
}

template <typename T, int SIZE, int VECTORS>
struct Row {
    Packed<T, SIZE> vec[VECTORS];

    float operator()(int v, int j) const { return vec[v](j); }

    // Set each element (v, j) to value(v, j), rounded to T.
    template <typename F>
    void set(F value) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) vec[v].set([&](int j) { return value(v, j); });
    }

    void load(const T* row, int dim) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) vec[v] = load_vector<SIZE>(row, v, dim);
    }

    void store(T* row, int dim) const {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (row_column<SIZE>(v) < dim) vec[v].store(row + row_column<SIZE>(v));
    }
};

// Compiler barrier for loads. It stops the compiler from hoisting the loads below it and from reusing the
// values loaded above it; either would need more registers than a thread has. ptxas ignores this barrier.
// With SYNC_WARP the barrier is a __syncwarp, which ptxas respects too.
template <bool SYNC_WARP = false>
void separate_loads() {
    if constexpr (SYNC_WARP) __syncwarp();
    else asm volatile("" ::: "memory");
}

// Issue copies of a thread's vectors of a row to the same columns of a row in shared memory.
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

// A software pipeline over rows: rows of the residual stream (fp32) and of ARRAYS arrays of T. A warp or
// block processes every (gridDim.x * blockDim.y)-th row. With two stages cp.async prefetches the
// next row to shared memory while the current row is processed. A thread copies and reads only its own
// vectors, so no block barrier is needed.
template <typename T, int SIZE, int VECTORS, int ARRAYS>
struct RowQueue {
    const float* stream_source;  // (rows, dim), global memory
    const T* sources[ARRAYS];    // (rows, dim) each, or null for an absent array
    float* stream_stages;        // (stages, dim), shared memory of this threadIdx.y
    T* array_stages;             // (stages, ARRAYS, dim)
    int row, rows, dim, stages, stage;

    // `shared`: (blockDim.y, stages, dim) floats, then (blockDim.y, stages, ARRAYS, dim) elements of T.
    // `stages`: 1 or 2 rows that are loaded or in flight.
    RowQueue(float4* shared, const float* stream, const T* const (&arrays)[ARRAYS], int rows, int dim,
             int stages)
        : stream_source(stream), row(blockIdx.x * blockDim.y + threadIdx.y), rows(rows), dim(dim),
          stages(stages), stage(0) {
        float* const floats = reinterpret_cast<float*>(shared);
        stream_stages = floats + threadIdx.y * stages * dim;
        T* const array_base = reinterpret_cast<T*>(floats + blockDim.y * stages * dim);
        array_stages = array_base + threadIdx.y * stages * ARRAYS * dim;
#pragma unroll
        for (int a = 0; a < ARRAYS; a++) sources[a] = arrays[a];
        fetch(row);
        if (stages == 1) return;
        stage = 1;
        fetch(row + step());
        stage = 0;
    }

    static int step() { return gridDim.x * blockDim.y; }

    // Array a's row in the current stage.
    T* array_stage(int a) const { return array_stages + (stage * ARRAYS + a) * dim; }

    // Issue the copies of a row to the current stage.
    void fetch(int next_row) {
        if (next_row < rows) {
            const long long start = (long long)next_row * dim;
            copy_row<SIZE, VECTORS>(stream_stages + stage * dim, stream_source + start, dim);
#pragma unroll
            for (int a = 0; a < ARRAYS; a++)
                if (sources[a]) copy_row<SIZE, VECTORS>(array_stage(a), sources[a] + start, dim);
        }
        cp_async_commit();  // even if empty: wait() counts groups
    }

    // Wait until the current row is in shared memory.
    void wait() const {
        if (stages == 1) cp_async_wait<0>();
        else cp_async_wait<1>();
    }

    // The thread's v-th vector of the current row of the residual stream.
    Packed<float, SIZE> stream(int v) const {
        return load_vector<SIZE>(stream_stages + stage * dim, v, dim);
    }

    // The thread's v-th vector of the current row of array a; zeros if the array is absent.
    Packed<T, SIZE> get(int a, int v) const {
        return load_vector<SIZE>(array_stage(a), v, sources[a] ? dim : 0);
    }

    // Advance to the next row. The stage of the current row is overwritten.
    void next() {
        fetch(row + stages * step());
        row += step();
        stage ^= stages - 1;
    }
};

// The residual addition: stream + (branch + bias) of the queue's current row, where array 0 is the branch.
// The sum is stored to residual_out and returned. Without a branch, the stream's row is returned and
// nothing is stored. bias (dim,) or null; it is read through L1.
template <typename T, int SIZE, int VECTORS>
Row<float, SIZE, VECTORS> add_branch(const RowQueue<T, SIZE, VECTORS, 1>& queue, float* residual_out,
                                      const float* bias) {
    Row<float, SIZE, VECTORS> x;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) x.vec[v] = queue.stream(v);
    if (!queue.sources[0]) return x;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        separate_loads();
        const auto branch = queue.get(0, v);
        const auto bias_vec = load_vector<SIZE>(bias, v, bias ? queue.dim : 0);
        x.vec[v].set([&](int j) { return x(v, j) + (branch(j) + bias_vec(j)); });
    }
    x.store(residual_out + (long long)queue.row * queue.dim, queue.dim);
    return x;
}

// Sum over the row of one value per thread. All threads that own the row call it and get the result.
inline float row_sum(float value) {
    return blockDim.x == WARP ? warp_reduce(value, Sum()) : block_reduce(value, Sum(), 0.0f);
}

// Two such sums. In a warp their shuffles are interleaved, so each hides the other's latency.
inline float2 row_sums(float a, float b) {
    if (blockDim.x != WARP) {
        a = block_reduce(a, Sum(), 0.0f);
        return make_float2(a, block_reduce(b, Sum(), 0.0f));
    }
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const float other_a = __shfl_xor_sync(ALL_LANES, a, offset);
        const float other_b = __shfl_xor_sync(ALL_LANES, b, offset);
        a += other_a, b += other_b;
    }
    return make_float2(a, b);
}

// Store the block's column sums to its row of partial[array], (gridDim.x, dim). `sums` (VECTORS, SIZE) are
// the thread's sums over the rows that it processed. If warps own rows, `warp_partials` is shared memory of
// (blockDim.y, dim) floats, and the warps' sums are added in warp order. It may alias a RowQueue that is
// finished.
template <int SIZE, int VECTORS>
void store_column_sums(float* partial, int array, float* warp_partials, const float (&sums)[VECTORS][SIZE],
                       int dim) {
    float* const block_row = partial + (long long)(array * gridDim.x + blockIdx.x) * dim;
    float* const target = blockDim.y == 1 ? block_row : warp_partials + threadIdx.y * dim;
    __syncthreads();  // WAR: separates the writes below from the reads of an earlier call and of a queue
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int j = 0; j < SIZE; j++)
            if (row_column<SIZE>(v) < dim) target[row_column<SIZE>(v) + j] = sums[v][j];
    if (blockDim.y == 1) return;
    __syncthreads();  // RAW: every thread reads the per-warp sums written above
    for (int i = threadIdx.y * WARP + threadIdx.x; i < dim; i += blockDim.y * WARP) {
        float sum = 0.0f;
        for (int warp = 0; warp < blockDim.y; warp++) sum += warp_partials[warp * dim + i];
        block_row[i] = sum;
    }
}
