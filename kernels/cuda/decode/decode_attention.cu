// Attention of new tokens over a KV cache. Queries are few and keys are many: the keys are split (split-KV).
//
// New token t sees rows 0 .. length + t of keys and values. Rows from `length` on are the new tokens' own.
//
//     s[j] = q . k[j] / sqrt(D)        out = sum_j exp(s[j]) v[j] / sum_j exp(s[j])
//     one split:   m = max s[j],  l = sum_j exp(s[j] - m),  o = sum_j exp(s[j] - m) v[j]
//     all splits:  M = max m,     out = sum exp(m - M) o / sum exp(m - M) l
//
// Layout: qkv (B, n, H + 2 KV, D), keys and values (B, context, KV, D), out (B, n, H, D), all of T. length ()
//         int32, in device memory, so a captured graph stays valid. partial (B n H, splits, 2 + D) fp32: m,
//         l, o of each split.
// Grid: the keys of one (token, head) are split among gridDim.z blocks, at least MIN_KEYS_PER_SPLIT each.
//       With few keys some blocks have none and return. The last block of a (token, head) to finish combines
//       the splits.
// Team: TEAM_LANES lanes process one key at a time, each lane a part of the features. The next key is
//       prefetched.
// Overlap: cached rows were written before this graph or pass. So the first of them are loaded before the
//          kernel waits for the one that writes qkv.
// Appending: blocks read the new tokens' keys and values from qkv, never from the cache. So appending races
//            with no read.
// Precision: fp32 arithmetic, one rounding to T. Determinism: every sum has a fixed order. The atomic counter
//            decides which block combines the splits, not in which order.
// Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1 (the combination).

#include "dependent_launch.cuh"
#include "reduce.cuh"

// Threads of a block, and the largest head dim: in the end a thread combines one feature. Not tuned.
constexpr int THREADS = 128;
constexpr int TEAM_LANES = 8;           // not tuned
constexpr int MIN_KEYS_PER_SPLIT = 32;  // not tuned

inline float minus_infinity() { return __int_as_float(0xff800000); }

// fragment[p]: feature (p / SIZE * TEAM_LANES + lane) * SIZE + p % SIZE of a row; zero from head_dim on.
template <typename T, int SIZE, int ELEMENTS>
void load_row(float (&fragment)[ELEMENTS], const T* row, int head_dim) {
#pragma unroll
    for (int p = 0; p < ELEMENTS; p += SIZE) {
        const int d = (p / SIZE * TEAM_LANES + threadIdx.x % TEAM_LANES) * SIZE;
        Vector<T, SIZE> loaded = {};
        if (d < head_dim) loaded = *reinterpret_cast<const Vector<T, SIZE>*>(row + d);
#pragma unroll
        for (int i = 0; i < SIZE; i++) fragment[p + i] = to_float(loaded.element[i]);
    }
}

// The last block of a (token, head) to store its split combines all splits, in order, one thread a feature.
// `finished` counts the blocks that have stored theirs; the last block resets it to zero.
template <typename T>
void combine_when_last(T* out, const float* partial, int* finished, int splits, int head_dim) {
    __shared__ bool is_last;
    const long long row = (long long)blockIdx.x * gridDim.y + blockIdx.y;
    const int d = threadIdx.x;
    if (splits > 1) {
        __threadfence();  // release: orders this thread's stores to `partial` before the count
        __syncthreads();  // separates all threads' stores and fences from the count
        if (threadIdx.x == 0) {
            is_last = atomicAdd(&finished[row], 1) == splits - 1;
            if (is_last) finished[row] = 0;
        }
        __syncthreads();  // separates the write of is_last from its reads
        if (!is_last) return;
        __threadfence();  // acquire: orders the count before the loads of the other blocks' splits
    } else {
        __syncthreads();  // separates the stores of the block's only split from the loads below
    }
    if (d >= head_dim) return;
    // volatile: an L1 line may be stale.
    const volatile float* split = partial + row * gridDim.z * (2 + head_dim);
    float max_m = minus_infinity();  // finite in the end: a token sees itself
#pragma unroll 8  // loads in flight; not tuned
    for (int i = 0; i < splits; i++) max_m = fmaxf(max_m, split[i * (2 + head_dim)]);
    float l = 0.0f, o = 0.0f;
#pragma unroll 8
    for (int i = 0; i < splits; i++) {
        const float rescale = __expf(split[i * (2 + head_dim)] - max_m);
        l += rescale * split[i * (2 + head_dim) + 1];
        o += rescale * split[i * (2 + head_dim) + 2 + d];
    }
    out[row * head_dim + d] = from_float<T>(o / l);
}

// Grid: (B n, H, splits).
template <typename T, int SIZE>
__global__ void __launch_bounds__(THREADS)
    decode_attention(T* out, float* partial, int* finished, const T* qkv, T* keys, T* values,
                     const int* length, int count, int context, int heads, int kv_heads, int head_dim,
                     float scale) {
    constexpr int TEAMS = THREADS / TEAM_LANES;     // keys that the block processes at once
    constexpr int ELEMENTS = THREADS / TEAM_LANES;  // features of a lane, for the largest head dim
    __shared__ float team_m[TEAMS], team_l[TEAMS], team_o[TEAMS][THREADS];
    launch_dependents();
    const int b = blockIdx.x / count, t = blockIdx.x % count, head = blockIdx.y, split = blockIdx.z;
    const int group = heads / kv_heads, kv_head = head / group, team = threadIdx.x / TEAM_LANES;
    const int cached_len = *length, visible = cached_len + t + 1, splits = gridDim.z;
    // Rounded up to whole passes of all teams.
    const int split_keys =
        max((visible + splits - 1) / splits + TEAMS - 1, MIN_KEYS_PER_SPLIT) / TEAMS * TEAMS;
    const int begin = split * split_keys, end = min(begin + split_keys, visible);  // begin <= j < end
    if (begin >= visible) return;
    const long long token_stride = (long long)(heads + 2 * kv_heads) * head_dim;
    const long long new_rows = (long long)b * count * token_stride;
    const long long cache_rows = ((long long)b * context * kv_heads + kv_head) * head_dim;

    float query[ELEMENTS], key[ELEMENTS] = {}, value[ELEMENTS] = {};
    float o[ELEMENTS] = {}, m = minus_infinity(), l = 0.0f;
    const auto load_cached = [&](int j) {
        const long long row = cache_rows + (long long)j * kv_heads * head_dim;
        load_row<T, SIZE>(key, keys + row, head_dim);
        load_row<T, SIZE>(value, values + row, head_dim);
    };
    const auto load_new = [&](int j) {
        const T* const row =
            qkv + new_rows + (j - cached_len) * token_stride + (long long)(heads + kv_head) * head_dim;
        load_row<T, SIZE>(key, row, head_dim);
        load_row<T, SIZE>(value, row + (long long)kv_heads * head_dim, head_dim);
    };
    int j = begin + team;
    const bool is_cached = j < min(cached_len, end);
    if (is_cached) load_cached(j);
    grid_dependency_wait();
    if (!is_cached && j < end) load_new(j);
    load_row<T, SIZE>(query, qkv + new_rows + t * token_stride + (long long)head * head_dim, head_dim);
    // All teams make the same number of passes, because all lanes of a warp shuffle together.
    for (int first = begin; first < end; first += TEAMS, j += TEAMS) {
        float this_key[ELEMENTS], this_value[ELEMENTS];
#pragma unroll
        for (int p = 0; p < ELEMENTS; p++) this_key[p] = key[p], this_value[p] = value[p];
        if (j + TEAMS < end) {
            if (j + TEAMS < cached_len) load_cached(j + TEAMS);
            else load_new(j + TEAMS);
        }
        float dot = 0.0f;
#pragma unroll
        for (int p = 0; p < ELEMENTS; p++) dot += query[p] * this_key[p];
#pragma unroll
        for (int offset = TEAM_LANES / 2; offset > 0; offset /= 2)
            dot += __shfl_xor_sync(ALL_LANES, dot, offset);
        if (j >= end) continue;  // only after the shuffles. Below, new_m is finite, so exp needs no guard
        const float score = dot * scale, new_m = fmaxf(m, score);
        const float rescale = __expf(m - new_m), p_new = __expf(score - new_m);
        m = new_m;
        l = l * rescale + p_new;
#pragma unroll
        for (int p = 0; p < ELEMENTS; p++) o[p] = o[p] * rescale + p_new * this_value[p];
    }
    if (threadIdx.x % TEAM_LANES == 0) {
        team_m[team] = m;
        team_l[team] = l;
    }
#pragma unroll
    for (int p = 0; p < ELEMENTS; p++) {
        const int d = (p / SIZE * TEAM_LANES + threadIdx.x % TEAM_LANES) * SIZE + p % SIZE;
        team_o[team][d] = o[p];
    }
    __syncthreads();  // separates the writes of team_m, team_l and team_o from the reads below
    float* const split_partial =
        partial + (((long long)blockIdx.x * heads + head) * gridDim.z + split) * (2 + head_dim);
    float block_m = minus_infinity();
#pragma unroll
    for (int i = 0; i < TEAMS; i++) block_m = fmaxf(block_m, team_m[i]);
    // block_m is finite, as the block has a key. A team without keys has m = -inf and so the factor 0.
    float block_l = 0.0f, block_o = 0.0f;
#pragma unroll
    for (int i = 0; i < TEAMS; i++) {
        const float rescale = __expf(team_m[i] - block_m);
        block_l += rescale * team_l[i];
        block_o += rescale * team_o[i][threadIdx.x];
    }
    if (threadIdx.x < head_dim) split_partial[2 + threadIdx.x] = block_o;
    if (threadIdx.x == 0) {
        split_partial[0] = block_m;
        split_partial[1] = block_l;
    }
    combine_when_last(out, partial, finished, (visible + split_keys - 1) / split_keys, head_dim);
    // The first split of a KV head's first query head appends the token's key and value to the cache.
    if (split == 0 && head % group == 0 && threadIdx.x < head_dim) {
        const long long source =
            new_rows + t * token_stride + (long long)(heads + kv_head) * head_dim + threadIdx.x;
        const long long target =
            cache_rows + (long long)(cached_len + t) * kv_heads * head_dim + threadIdx.x;
        keys[target] = qkv[source];
        values[target] = qkv[source + (long long)kv_heads * head_dim];
    }
}
