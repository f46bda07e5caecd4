// Attention of new tokens over the keys and values that a cache holds; few queries, many keys, so the keys are shared out.
//
// New token t sees the rows 0 .. length + t of keys and values, of which the rows from length on are the new tokens' own:
//
//     s[j] = q . k[j] / sqrt(D)        out = sum_j exp(s[j]) v[j] / sum_j exp(s[j])
//
// A share of the keys gives its largest score m, l = sum_j exp(s[j] - m) and o = sum_j exp(s[j] - m) v[j]; shares combine as
// out = sum exp(m - M) o / sum exp(m - M) l with M the largest m.
//
// Layout: qkv (B, n, H + 2 KV, D), keys and values (B, context, KV, D), out (B, n, H, D), all of T; length () int32, in device
//         memory so that a captured graph stays good. partial (B n H, splits, 2 + D) fp32: m, l, o of each share.
// Work: the keys that a token sees are split among the blocks of its (token, head), at least SMALLEST_SHARE each, so that with few keys
//       there are blocks with nothing to do. Within a block LANES lanes take a key at a time, each a part of the features, and the next
//       is on its way meanwhile; the last block of a (token, head) that has finished combines the shares.
// Overlap: what the cache holds was written before the graph or pass that this kernel is in; the first rows of it are on their way before
//       the kernel waits for the one that makes qkv.
// Appending: a block reads the new tokens' rows from qkv and never from the cache, so whoever copies them there disturbs none.
// Precision: fp32 arithmetic, one rounding to T. Determinism: every sum has a fixed order; the atomic count
//       decides which block adds the shares up, not how.
// Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1 (the combination).

#include "dependent_launch.cuh"
#include "reduce.cuh"

constexpr int THREADS = 128;  // a feature each in the end, so that this is the largest head dim
constexpr int LANES = 8;             // of a key; not tuned
constexpr int SMALLEST_SHARE = 32;   // keys; not tuned

inline float minus_infinity() { return __int_as_float(0xff800000); }

// value[p]: the features (p / SIZE * LANES + lane) * SIZE + p % SIZE of a row, zeros from head_dim on.
template <typename T, int SIZE, int PARTS>
void load_row(float (&value)[PARTS], const T* row, int head_dim) {
#pragma unroll
    for (int p = 0; p < PARTS; p += SIZE) {
        const int d = (p / SIZE * LANES + threadIdx.x % LANES) * SIZE;
        Vector<T, SIZE> loaded = {};
        if (d < head_dim) loaded = *reinterpret_cast<const Vector<T, SIZE>*>(row + d);
#pragma unroll
        for (int i = 0; i < SIZE; i++) value[p + i] = to_float(loaded.element[i]);
    }
}

// The block of a (token, head) that is the last to have written its share adds all of them up, in the order of the splits, a
// thread a feature. `finished` counts those of `splits` that have written, and is zero again in the end.
template <typename T>
void combine_when_last(T* out, const float* partial, int* finished, int splits, int head_dim) {
    __shared__ bool last;
    const long long row = (long long)blockIdx.x * gridDim.y + blockIdx.y;
    const int d = threadIdx.x;
    if (splits > 1) {
        __threadfence();  // this thread's part of the share, written before, is seen by whoever sees the count
        __syncthreads();  // all threads' parts are
        if (threadIdx.x == 0) {
            last = atomicAdd(&finished[row], 1) == splits - 1;
            if (last) finished[row] = 0;
        }
        __syncthreads();  // `last`, written above, is read by all
        if (!last) return;
        __threadfence();  // the other blocks' shares are read after the count
    } else {
        __syncthreads();  // the block's own share, written before, is read below by all
    }
    if (d >= head_dim) return;
    const volatile float* shares = partial + row * gridDim.z * (2 + head_dim);  // volatile: not from an older line of the L1 cache
    float largest = minus_infinity();  // finite in the end: a token sees itself
#pragma unroll 8  // loads in flight
    for (int i = 0; i < splits; i++) largest = fmaxf(largest, shares[i * (2 + head_dim)]);
    float total = 0.0f, sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < splits; i++) {
        const float weight = __expf(shares[i * (2 + head_dim)] - largest);  // 0 of a share without keys
        total += weight * shares[i * (2 + head_dim) + 1];
        sum += weight * shares[i * (2 + head_dim) + 2 + d];
    }
    out[row * head_dim + d] = from_float<T>(sum / total);
}

// Grid (B n, H, splits).
template <typename T, int SIZE>
__global__ void __launch_bounds__(THREADS)
    decode_attention(T* out, float* partial, int* finished, const T* qkv, T* keys, T* values, const int* length, int count,
                     int context, int heads, int kv_heads, int head_dim, float scale) {
    constexpr int TEAMS = THREADS / LANES;  // keys that the block has in hand
    constexpr int PARTS = THREADS / LANES;  // features of a lane
    __shared__ float team_largest[TEAMS], team_total[TEAMS], team_sum[TEAMS][THREADS];
    launch_dependents();
    const int b = blockIdx.x / count, t = blockIdx.x % count, head = blockIdx.y, split = blockIdx.z;
    const int group = heads / kv_heads, shared = head / group, team = threadIdx.x / LANES;
    const int held = *length, visible = held + t + 1, splits = gridDim.z;
    const int share = max((visible + splits - 1) / splits + TEAMS - 1, SMALLEST_SHARE) / TEAMS * TEAMS;
    const int begin = split * share, end = min(begin + share, visible);  // the keys begin <= j < end
    if (begin >= visible) return;
    const long long step = (long long)(heads + 2 * kv_heads) * head_dim, new_rows = (long long)b * count * step;
    const long long cache_rows = ((long long)b * context * kv_heads + shared) * head_dim;

    float query[PARTS], key[PARTS] = {}, value[PARTS] = {}, sum[PARTS] = {}, largest = minus_infinity(), total = 0.0f;
    const auto fetch_cached = [&](int j) {
        const long long row = cache_rows + (long long)j * kv_heads * head_dim;
        load_row<T, SIZE>(key, keys + row, head_dim);
        load_row<T, SIZE>(value, values + row, head_dim);
    };
    const auto fetch_new = [&](int j) {
        const T* const row = qkv + new_rows + (j - held) * step + (long long)(heads + shared) * head_dim;
        load_row<T, SIZE>(key, row, head_dim);
        load_row<T, SIZE>(value, row + (long long)kv_heads * head_dim, head_dim);
    };
    int j = begin + team;
    const bool cached = j < min(held, end);
    if (cached) fetch_cached(j);
    grid_dependency_wait();
    if (!cached && j < end) fetch_new(j);
    load_row<T, SIZE>(query, qkv + new_rows + t * step + (long long)head * head_dim, head_dim);
    // All teams go round equally often, for the lanes of a warp shuffle together.
    for (int first = begin; first < end; first += TEAMS, j += TEAMS) {
        float this_key[PARTS], this_value[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; p++) this_key[p] = key[p], this_value[p] = value[p];
        if (j + TEAMS < end) {
            if (j + TEAMS < held) fetch_cached(j + TEAMS);
            else fetch_new(j + TEAMS);
        }
        float dot = 0.0f;
#pragma unroll
        for (int p = 0; p < PARTS; p++) dot += query[p] * this_key[p];
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(ALL_LANES, dot, offset);
        if (j >= end) continue;  // after the shuffles; then largest is finite below, and exp needs no guard
        const float score = dot * scale, raised = fmaxf(largest, score);
        const float kept = __expf(largest - raised), p_new = __expf(score - raised);
        largest = raised;
        total = total * kept + p_new;
#pragma unroll
        for (int p = 0; p < PARTS; p++) sum[p] = sum[p] * kept + p_new * this_value[p];
    }
    if (threadIdx.x % LANES == 0) {
        team_largest[team] = largest;
        team_total[team] = total;
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const int d = (p / SIZE * LANES + threadIdx.x % LANES) * SIZE + p % SIZE;
        team_sum[team][d] = sum[p];
    }
    __syncthreads();  // the teams' shares, written above, are combined below
    float* target = partial + (((long long)blockIdx.x * heads + head) * gridDim.z + split) * (2 + head_dim);
    float all_largest = minus_infinity();
#pragma unroll
    for (int i = 0; i < TEAMS; i++) all_largest = fmaxf(all_largest, team_largest[i]);
    const float shift = all_largest == minus_infinity() ? 0.0f : all_largest;  // no key here: exp(-inf - -inf) would be NaN
    float all_total = 0.0f, all_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < TEAMS; i++) {
        const float weight = __expf(team_largest[i] - shift);
        all_total += weight * team_total[i];
        all_sum += weight * team_sum[i][threadIdx.x];
    }
    if (threadIdx.x < head_dim) target[2 + threadIdx.x] = all_sum;
    if (threadIdx.x == 0) {
        target[0] = all_largest;
        target[1] = all_total;
    }
    combine_when_last(out, partial, finished, (visible + share - 1) / share, head_dim);
    // The first split of a group's first query head appends the token's own key and value.
    if (split == 0 && head % group == 0 && threadIdx.x < head_dim) {
        const long long from = new_rows + t * step + (long long)(heads + shared) * head_dim + threadIdx.x;
        const long long to = cache_rows + (long long)(held + t) * kv_heads * head_dim + threadIdx.x;
        keys[to] = qkv[from];
        values[to] = qkv[from + (long long)kv_heads * head_dim];
    }
}
