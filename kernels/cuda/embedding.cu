// Token embedding, with a learned position embedding if the model has one.
//
//     out[row] = weight[token of row] + position_weight[position of row]
//     dweight[key] += sum of dout[row] over the rows with this key, in a fixed order
//     key: a row's token, or its position
//
// Layout: out (rows, dim), weight (vocab, dim), position_weight (context, dim), dweight fp32;
//         dout (rows, dim) of T; tokens, start (rows,) int. rows = B * length; position = t - start.
// Work, forward: a thread owns a vector of SIZE columns of a row.
// Work, backward: a counting sort groups the rows by key, then each key's rows are summed. Five kernels:
//   count_keys   Block: ROWS rows. Counts each key among the block's rows.
//   make_lists   Thread: a key. Reserves room for the key's row list and finds each block's first slot in it.
//                Appends the key to the short or the long work list, by its number of rows.
//   place_rows   Block: ROWS rows. Writes each row to its key's list, in row order.
//   add_short    Warp: a key and 32 vectors of columns. Adds the key's rows one after another.
//   add_long     Block: a key and 32 vectors of columns. Each of WARPS warps adds every WARPS-th row. The
//                block then adds the warps' sums in warp order.
// Precision: fp32 arithmetic, no rounding to T.
// Determinism: atomics act on integers only. Where a list lies, and the order of the work lists, change from
//              run to run. A list's contents and every order of summation do not.

#include "dependent_launch.cuh"
#include "vectors.cuh"

// tokens is null if the key is the position.
inline int key_of(const int* tokens, const int* start, int row, int length) {
    return tokens ? tokens[row] : row % length - start[row];
}

// count: the number of vectors, below 2^32. Element offsets may pass 2^31 and are long long. row_vectors: dim
// / SIZE. position_weight is null if positions are not learned.
template <int SIZE>
__global__ void __launch_bounds__(256)
    embedding_forward(float* out, const int* tokens, const int* start, const float* weight,
                      const float* position_weight, unsigned count, unsigned row_vectors, int length) {
    launch_dependents();
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int row = i / row_vectors;
    const unsigned column = i % row_vectors * SIZE;
    const long long dim = (long long)row_vectors * SIZE;
    Packed<float, SIZE> x;
    x.load(weight + tokens[row] * dim + column);
    if (position_weight) {
        Packed<float, SIZE> position;
        position.load(position_weight + (row % length - start[row]) * dim + column);
        x.set([&](int j) { return x(j) + position(j); });
    }
    x.store(out + (long long)i * SIZE);
}

// counts (blocks, keys) is zero on entry. blocks * keys may pass 2^31.
template <int ROWS>
__global__ void __launch_bounds__(ROWS)
    embedding_count_keys(int* counts, const int* tokens, const int* start, int rows, int length, int keys) {
    const int row = blockIdx.x * ROWS + threadIdx.x;
    if (row < rows) atomicAdd(counts + (long long)blockIdx.x * keys + key_of(tokens, start, row, length), 1);
}

// counts: becomes each block's first slot in the key's list. list_begin and list_size (keys,).
// list_counters: zero on entry; three counters, of rows placed, of short lists and of long lists.
// short_keys and long_keys: the keys with at most SHORT rows, and those with more.
template <int SHORT>
__global__ void __launch_bounds__(256)
    embedding_make_lists(int* counts, int* list_counters, int* list_begin, int* list_size, int* short_keys,
                         int* long_keys, int blocks, int keys) {
    constexpr int LOADS_IN_FLIGHT = 8;  // counts that a thread loads before it sums them; not tuned
    const int key = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % WARP;
    int total = 0;
    if (key < keys)
        for (int first = 0; first < blocks; first += LOADS_IN_FLIGHT) {
            int block_count[LOADS_IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < LOADS_IN_FLIGHT; i++)
                block_count[i] = first + i < blocks ? counts[(long long)(first + i) * keys + key] : 0;
#pragma unroll
            for (int i = 0; i < LOADS_IN_FLIGHT; i++) {
                if (block_count[i]) counts[(long long)(first + i) * keys + key] = total;
                total += block_count[i];
            }
        }
    // A warp's inclusive prefix sum of `total`. ALL_LANES is right: no lane has returned yet.
    int prefix = total;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const int lower = __shfl_up_sync(ALL_LANES, prefix, offset);
        if (lane >= offset) prefix += lower;
    }
    const int warp_total = __shfl_sync(ALL_LANES, prefix, WARP - 1);
    prefix -= total;  // exclusive from here on
    const bool is_short = total > 0 && total <= SHORT, is_long = total > SHORT;
    const unsigned short_lanes = __ballot_sync(ALL_LANES, is_short);
    const unsigned long_lanes = __ballot_sync(ALL_LANES, is_long);
    // Lanes 0 to 2 each advance one of the three counters for the whole warp.
    int base = 0;
    const unsigned counted = lane == 1 ? short_lanes : long_lanes;
    if (lane < 3) base = atomicAdd(list_counters + lane, lane == 0 ? warp_total : __popc(counted));
    const int rows_base = __shfl_sync(ALL_LANES, base, 0), short_base = __shfl_sync(ALL_LANES, base, 1);
    const int long_base = __shfl_sync(ALL_LANES, base, 2);
    if (total == 0) return;
    const unsigned lower_lanes = (1u << lane) - 1;
    list_begin[key] = rows_base + prefix;
    list_size[key] = total;
    if (is_short) short_keys[short_base + __popc(short_lanes & lower_lanes)] = key;
    if (is_long) long_keys[long_base + __popc(long_lanes & lower_lanes)] = key;
}

// row_lists (rows,): all keys' lists, each from its list_begin on.
template <int ROWS>
__global__ void __launch_bounds__(ROWS)
    embedding_place_rows(int* row_lists, const int* counts, const int* list_begin, const int* tokens,
                         const int* start, int rows, int length, int keys) {
    __shared__ alignas(16) int key_of_row[ROWS];
    const int row = blockIdx.x * ROWS + threadIdx.x;
    const int key = row < rows ? key_of(tokens, start, row, length) : -1;
    key_of_row[threadIdx.x] = key;
    __syncthreads();  // separates the writes of key_of_row from all threads' reads
    // A row's slot: its block's first slot, plus the number of earlier rows of the block with the same key.
    // All lanes take part in the match. Lanes beyond the rows have key -1, which matches no row's key.
    const int lane = threadIdx.x % WARP;
    int equal_before = __popc(__match_any_sync(ALL_LANES, key) & ((1u << lane) - 1));
#pragma unroll 4
    for (int other = 0; other < threadIdx.x - lane; other += 4) {
        const int4 four = *reinterpret_cast<const int4*>(key_of_row + other);
        equal_before += (four.x == key) + (four.y == key) + (four.z == key) + (four.w == key);
    }
    if (row >= rows) return;
    row_lists[list_begin[key] + counts[(long long)blockIdx.x * keys + key] + equal_before] = row;
}

// Adds the rows list[first], list[first + step], ... of dout to sum, in this order: SIZE columns from
// `column` on.
template <typename T, int SIZE>
void add_list(float (&sum)[SIZE], const T* dout, const int* list, int first, int step, int size, int dim,
              int column) {
#pragma unroll 4
    for (int i = first; i < size; i += step) {
        Packed<T, SIZE> d;
        d.load(dout + (long long)list[i] * dim + column);
#pragma unroll
        for (int j = 0; j < SIZE; j++) sum[j] += d(j);
    }
}

// key_count: the number of short keys. Warps stride over the keys; blockIdx.y selects the slice of columns.
template <typename T, int SIZE>
__global__ void __launch_bounds__(256)
    embedding_add_short(float* dweight, const T* dout, const int* row_lists, const int* list_begin,
                        const int* list_size, const int* short_keys, const int* key_count, int dim) {
    const int column = (blockIdx.y * WARP + threadIdx.x) * SIZE;
    if (column >= dim) return;
    const int end = *key_count;
    for (int i = blockIdx.x * blockDim.y + threadIdx.y; i < end; i += gridDim.x * blockDim.y) {
        const int key = short_keys[i];
        float sum[SIZE] = {};
        add_list(sum, dout, row_lists + list_begin[key], 0, 1, list_size[key], dim, column);
        float* const target = dweight + (long long)key * dim + column;
        float total[SIZE];
        load_floats(total, target);
#pragma unroll
        for (int j = 0; j < SIZE; j++) total[j] += sum[j];
        store_floats(target, total);
    }
}

// key_count: the number of long keys. Blocks stride over the keys; blockIdx.y selects the slice of columns.
template <typename T, int SIZE, int WARPS>
__global__ void __launch_bounds__(WARP * WARPS)
    embedding_add_long(float* dweight, const T* dout, const int* row_lists, const int* list_begin,
                       const int* list_size, const int* long_keys, const int* key_count, int dim) {
    __shared__ float warp_partials[WARPS][WARP * SIZE];
    const int first_column = blockIdx.y * WARP * SIZE, column = first_column + threadIdx.x * SIZE;
    const int thread = threadIdx.y * WARP + threadIdx.x;
    const int end = *key_count;
    for (int i = blockIdx.x; i < end; i += gridDim.x) {
        const int key = long_keys[i];
        float sum[SIZE] = {};
        if (column < dim)
            add_list(sum, dout, row_lists + list_begin[key], threadIdx.y, WARPS, list_size[key], dim, column);
#pragma unroll
        for (int j = 0; j < SIZE; j++) warp_partials[threadIdx.y][threadIdx.x * SIZE + j] = sum[j];
        __syncthreads();  // separates the warps' writes of warp_partials from all threads' reads
        if (thread < WARP * SIZE && first_column + thread < dim) {
            float total = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++) total += warp_partials[warp][thread];
            dweight[(long long)key * dim + first_column + thread] += total;
        }
        __syncthreads();  // separates these reads from the next key's writes
    }
}
