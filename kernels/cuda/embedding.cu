// Token embedding, with a learned position embedding where the model has one.
//
//     out[row] = weight[token of row] + position_weight[position of row]
//     dweight[key] += sum over the rows with this key, in order, of dout[row]       (the key: a row's token, or its position)
//
// Layout: out (rows, dim), weight (vocab, dim) and position_weight (context, dim) fp32, as the gradients are; dout (rows, dim) of T;
// tokens and start (rows,) int, rows = B * length; position = t - start.
// Work: forward, a thread owns a vector of SIZE columns of a row. Backward, four kernels:
//   count_keys   a block owns ROWS rows and counts each key among them.
//   make_lists   a thread owns a key: its rows' number, room for their list, and for each block of rows the place of its first
//                in the list. Keys go to one of two work lists, by the number of their rows.
//   place_rows   a block owns ROWS rows again; a row's place in its key's list is that of the block's first plus the number of
//                equal keys before it in the block. So a list holds its rows in order.
//   add_short    a warp owns a key and 32 vectors of columns, and adds up the rows one after another.
//   add_long     a block owns a key and 32 vectors of columns; each of its WARPS warps adds up every WARPS-th row, and warp by warp they
//                are then added.
// Precision: fp32 arithmetic, nothing is rounded to T.
// Determinism: atomics only on integers: counts, which come out the same in any order, and the room for a list and its place among
// the work, whose order changes from run to run, but not what any list holds nor how it is added up.

#include "dependent_launch.cuh"
#include "vectors.cuh"

// tokens is null where the key is the position.
inline int key_of(const int* tokens, const int* start, int row, int length) {
    return tokens ? tokens[row] : row % length - start[row];
}

// count: of vectors, below 2^32; elements beyond 2^31 are reached by long long. row_vectors: dim / SIZE.
// position_weight is null where positions are not learned.
template <int SIZE>
__global__ void __launch_bounds__(256)
    embedding_forward(float* out, const int* tokens, const int* start, const float* weight, const float* position_weight,
                      unsigned count, unsigned row_vectors, int length) {
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

// counts (blocks, keys) holds zeros. blocks * keys may pass 2^31.
template <int ROWS>
__global__ void __launch_bounds__(ROWS)
    embedding_count_keys(int* counts, const int* tokens, const int* start, int rows, int length, int keys) {
    const int row = blockIdx.x * ROWS + threadIdx.x;
    if (row < rows) atomicAdd(counts + (long long)blockIdx.x * keys + key_of(tokens, start, row, length), 1);
}

// taken holds three zeros: rows placed, short lists, long lists. begin and size (keys,); short_keys and long_keys,
// of keys with at most SHORT rows and with more.
template <int SHORT>
__global__ void __launch_bounds__(256)
    embedding_make_lists(int* counts, int* taken, int* begin, int* size, int* short_keys, int* long_keys, int blocks, int keys) {
    constexpr int AHEAD = 8;  // counts that a thread has under way; not tuned
    const int key = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % WARP;
    int total = 0;
    if (key < keys)
        for (int first = 0; first < blocks; first += AHEAD) {
            int here[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                here[i] = first + i < blocks ? counts[(long long)(first + i) * keys + key] : 0;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (here[i]) counts[(long long)(first + i) * keys + key] = total;
                total += here[i];
            }
        }
    int before = total;  // and, at first, including the thread's own
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const int lower = __shfl_up_sync(ALL_LANES, before, offset);  // all lanes are here: none has returned
        if (lane >= offset) before += lower;
    }
    const int warp_partials = __shfl_sync(ALL_LANES, before, WARP - 1);
    before -= total;
    const bool is_short = total > 0 && total <= SHORT, is_long = total > SHORT;
    const unsigned short_lanes = __ballot_sync(ALL_LANES, is_short), long_lanes = __ballot_sync(ALL_LANES, is_long);
    int base = 0;
    if (lane < 3) base = atomicAdd(taken + lane, lane == 0 ? warp_partials : __popc(lane == 1 ? short_lanes : long_lanes));
    const int rows_base = __shfl_sync(ALL_LANES, base, 0), short_base = __shfl_sync(ALL_LANES, base, 1);
    const int long_base = __shfl_sync(ALL_LANES, base, 2);
    if (total == 0) return;
    const unsigned lower_lanes = (1u << lane) - 1;
    begin[key] = rows_base + before;
    size[key] = total;
    if (is_short) short_keys[short_base + __popc(short_lanes & lower_lanes)] = key;
    if (is_long) long_keys[long_base + __popc(long_lanes & lower_lanes)] = key;
}

// order (rows,): the lists.
template <int ROWS>
__global__ void __launch_bounds__(ROWS)
    embedding_place_rows(int* order, const int* counts, const int* begin, const int* tokens, const int* start, int rows, int length,
                         int keys) {
    __shared__ alignas(16) int key_of_row[ROWS];
    const int row = blockIdx.x * ROWS + threadIdx.x;
    const int key = row < rows ? key_of(tokens, start, row, length) : -1;
    key_of_row[threadIdx.x] = key;
    __syncthreads();  // the keys, written above, are read below by all
    // All lanes compare, those beyond the rows with a key of their own.
    const int lane = threadIdx.x % WARP;
    int equal_before = __popc(__match_any_sync(ALL_LANES, key) & ((1u << lane) - 1));
#pragma unroll 4
    for (int other = 0; other < threadIdx.x - lane; other += 4) {
        const int4 four = *reinterpret_cast<const int4*>(key_of_row + other);
        equal_before += (four.x == key) + (four.y == key) + (four.z == key) + (four.w == key);
    }
    if (row >= rows) return;
    order[begin[key] + counts[(long long)blockIdx.x * keys + key] + equal_before] = row;
}

// Add to sum, in their order, the rows list[first], list[first + step], ... of dout, from one column on.
template <typename T, int SIZE>
void add_list(float (&sum)[SIZE], const T* dout, const int* list, int first, int step, int size, int dim, int column) {
#pragma unroll 4
    for (int i = first; i < size; i += step) {
        Packed<T, SIZE> d;
        d.load(dout + (long long)list[i] * dim + column);
#pragma unroll
        for (int j = 0; j < SIZE; j++) sum[j] += d(j);
    }
}

// number: of short keys. A warp takes every gridDim.x * blockDim.y-th of them; blockIdx.y is the slice of columns.
template <typename T, int SIZE>
__global__ void __launch_bounds__(256)
    embedding_add_short(float* dweight, const T* dout, const int* order, const int* begin, const int* size, const int* short_keys,
                        const int* number, int dim) {
    const int column = (blockIdx.y * WARP + threadIdx.x) * SIZE;
    if (column >= dim) return;
    const int end = *number;
    for (int i = blockIdx.x * blockDim.y + threadIdx.y; i < end; i += gridDim.x * blockDim.y) {
        const int key = short_keys[i];
        float sum[SIZE] = {};
        add_list(sum, dout, order + begin[key], 0, 1, size[key], dim, column);
        float* const target = dweight + (long long)key * dim + column;
        float total[SIZE];
        load_floats(total, target);
#pragma unroll
        for (int j = 0; j < SIZE; j++) total[j] += sum[j];
        store_floats(target, total);
    }
}

// number: of long keys. A block takes every gridDim.x-th of them; blockIdx.y is the slice of columns.
template <typename T, int SIZE, int WARPS>
__global__ void __launch_bounds__(WARP * WARPS)
    embedding_add_long(float* dweight, const T* dout, const int* order, const int* begin, const int* size, const int* long_keys,
                       const int* number, int dim) {
    __shared__ float warp_partials[WARPS][WARP * SIZE];
    const int first = blockIdx.y * WARP * SIZE, column = first + threadIdx.x * SIZE;
    const int thread = threadIdx.y * WARP + threadIdx.x;
    const int end = *number;
    for (int i = blockIdx.x; i < end; i += gridDim.x) {
        const int key = long_keys[i];
        float sum[SIZE] = {};
        if (column < dim) add_list(sum, dout, order + begin[key], threadIdx.y, WARPS, size[key], dim, column);
#pragma unroll
        for (int j = 0; j < SIZE; j++) warp_partials[threadIdx.y][threadIdx.x * SIZE + j] = sum[j];
        __syncthreads();  // the warps' sums, written above, are read below by all
        if (thread < WARP * SIZE && first + thread < dim) {
            float total = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++) total += warp_partials[warp][thread];
            dweight[(long long)key * dim + first + thread] += total;
        }
        __syncthreads();  // separates these reads from the next key's writes
    }
}
