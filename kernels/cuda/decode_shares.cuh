// Cached attention within decode_step.cu: shares of the keys of each row and head, and the rows that they combine to.
//
//     s[j] = q . k[j] / sqrt(D)        a share: m = max s[j],  l = sum exp(s[j] - m),  o = sum exp(s[j] - m) v[j]
//     attended = sum exp(m - M) o / sum exp(m - M) l        over the shares, M being the largest m
//
// A row's keys are cut into at most SHARES shares of at least SMALLEST_SHARE keys. A block makes one share after another; LANES lanes
// take a key at a time, each a part of the features, AHEAD keys at once. The first keys are on their way before the block waits for
// the queries: what the cache holds was written before this launch. The block's scores meet in shared memory, so that all warps
// know m before any value is weighted, and sums are only added up.
// The multiplications and additions are written out, see decode_step.cu on determinism.
#pragma once

#include "handover.cuh"

constexpr int SHARES = 4, SMALLEST_SHARE = 64;   // not tuned
constexpr int LARGEST_HEAD_DIM = 128;

inline float minus_infinity() { return __int_as_float(0xff800000); }

// keys and values (B, context, KV, D) of one layer, of T; the rest is handed over: qkv (rows, H + 2 KV, D), state (rows, H, SHARES, 2),
// m and l, and sum (rows, H, SHARES, D). rows = B * count.
template <typename T, int ROWS>
struct Attention {
    const Word* qkv;
    T *keys, *values;
    Word *state, *sum;
    unsigned qkv_tag, tag;  // of qkv, and of what is made of it
    int held, count, context, heads, kv_heads, head_dim;

    int width() const { return (heads + 2 * kv_heads) * head_dim; }
    int sequence(int row) const { return ROWS == 1 ? 0 : row / count; }
    int behind(int row) const { return ROWS == 1 ? 0 : row % count; }  // the cache's last
    int visible(int row) const { return held + behind(row) + 1; }
    int share(int row) const { return max((visible(row) + SHARES - 1) / SHARES, SMALLEST_SHARE); }
    long long cached(int row, int shared, int j) const {  // passes 2^31 with 64 rows of 2^25 elements
        return (((long long)sequence(row) * context + j) * kv_heads + shared) * head_dim;
    }
    const Word* fresh(int row, int shared, int j) const {
        return qkv + (sequence(row) * count + j - held) * width() + (heads + shared) * head_dim;
    }
};

// A lane's part of a row of MOST features at most, (p * LANES + lane) * SIZE + i of which is element [p](i); zeros from head_dim on.
template <typename T, int SIZE, int MOST>
struct Features {
    static constexpr int LANES = SIZE == 8 ? 8 : 16, PARTS = MOST / (LANES * SIZE);
    static constexpr int AHEAD = SIZE > 1 && MOST < LARGEST_HEAD_DIM ? 2 : 1;  // as registers allow
    Packed<T, SIZE> part[PARTS];

    static int place(int p) { return (p * LANES + threadIdx.x % LANES) * SIZE; }
    void load(const T* row, int head_dim) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            part[p].clear();
            if (place(p) < head_dim) part[p].load(row + place(p));
        }
    }
    // Of floats in shared memory, numbers that T holds as well.
    void load_shared(const float* row, int head_dim) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            float x[SIZE] = {};
            if (place(p) < head_dim) load_floats(x, row + place(p));
            part[p].set([&](int j) { return x[j]; });
        }
    }
    template <typename F>
    void for_each(F use) const {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) use(p * SIZE + j, part[p](j));
    }
};

// handed (1 + 2 * fresh keys, D) = the query of a row and head, and from key j = `first` on to `end` each new key and value, for
// which the block, of LARGEST_HEAD_DIM threads at least, waits all at once. What is the row's own comes into the cache as well.
template <typename T, int SIZE, int ROWS>
void take_fresh(float* handed, const Attention<T, ROWS>& a, int row, int head, int shared, int first, int end) {
    constexpr int THREADS = LARGEST_HEAD_DIM / SIZE;  // of a vector each
    const int d = threadIdx.x % THREADS * SIZE, own = a.held + a.behind(row);
    for (int i = threadIdx.x / THREADS; i < 1 + 2 * max(end - first, 0); i += blockDim.x / THREADS) {
        const int j = first + (i - 1) / 2;
        const bool query = i == 0, key = i % 2;
        const Word* const from = query ? a.qkv + row * a.width() + head * a.head_dim
                                       : a.fresh(row, shared, j) + (key ? 0 : a.kv_heads * a.head_dim);
        T* const to = (key ? a.keys : a.values) + a.cached(row, shared, j);
        const bool appended = !query && j == own && head * a.kv_heads % a.heads == 0;  // by the first of the heads that share it
        if (d >= a.head_dim) continue;
        float x[SIZE];
        while (!load_published(x, from + d, a.qkv_tag)) {}
#pragma unroll
        for (int k = 0; k < SIZE; k++) handed[i * a.head_dim + d + k] = x[k];
        Packed<T, SIZE> packed;
        packed.set([&](int k) { return x[k]; });
        if (appended) packed.store(to + d);
    }
}

// A block's shares of all rows and heads, and the new keys and values into the cache.
// scratch: (1 + 2 * ROWS) * D + 2 * AHEAD * teams + warps * (D + 1) floats of shared memory.
template <int MOST, typename T, int SIZE, int ROWS>
void make_shares(const Attention<T, ROWS>& a, float* scratch) {
    using Row = Features<T, SIZE, MOST>;
    constexpr int LANES = Row::LANES, AHEAD = Row::AHEAD, WIDTH = Row::PARTS * SIZE, MOST_WARPS = 16;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP, head_dim = a.head_dim;
    const int team = threadIdx.x / LANES, teams = blockDim.x / LANES, batch = AHEAD * teams;
    const float scale = 1.0f / sqrtf((float)head_dim);
    float* const scores = scratch + (1 + 2 * ROWS) * head_dim;  // two batches': one is written while the other may still be read
    float* const of_warp = scores + 2 * batch;
    for (int unit = blockIdx.x; unit < SHARES * ROWS * a.heads; unit += gridDim.x) {
        const int split = unit / (ROWS * a.heads), place = unit - split * ROWS * a.heads, row = ROWS == 1 ? 0 : place / a.heads;
        const int head = place - row * a.heads, shared = head * a.kv_heads / a.heads;
        const int begin = split * a.share(row), end = min(begin + a.share(row), a.visible(row));  // the keys begin <= j < end
        if (begin >= end) continue;  // the whole block
        const int fresh = max(begin, a.held), stride = a.kv_heads * head_dim;
        const T *const keys = a.keys + a.cached(row, shared, 0), *const values = a.values + a.cached(row, shared, 0);
        Row query;
        float largest = minus_infinity(), total = 0.0f, sum[WIDTH] = {};
#pragma unroll 1
        for (int first = begin, half = 0; first < end; first += batch, half ^= 1) {
            Row key[AHEAD], value[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int j = first + i * teams + team;
                if (j < min(a.held, end)) {
                    key[i].load(keys + (long long)j * stride, head_dim);
                    value[i].load(values + (long long)j * stride, head_dim);
                }
            }
            if (first == begin) {
                take_fresh<T, SIZE>(scratch, a, row, head, shared, fresh, end);
                __syncthreads();  // what was handed over, written above, is read by all
                query.load_shared(scratch, head_dim);
            }
            float score[AHEAD];
            float* const of_batch = scores + half * batch;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int j = first + i * teams + team;
                score[i] = minus_infinity();
                if (j - team + warp * (WARP / LANES) >= end) continue;  // the whole warp, which the shuffles need
                if (j >= a.held && j < end) {
                    const float* const handed = scratch + (1 + 2 * (j - fresh)) * head_dim;
                    key[i].load_shared(handed, head_dim);
                    value[i].load_shared(handed + head_dim, head_dim);
                }
                float dots[2] = {};  // a chain each
                query.for_each([&](int k, float x) { dots[k % 2] = fmaf(x, key[i].part[k / SIZE](k % SIZE), dots[k % 2]); });
                float dot = dots[0] + dots[1];
#pragma unroll
                for (int offset = LANES / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(ALL_LANES, dot, offset);
                if (j < end) score[i] = __fmul_rn(dot, scale);
                of_batch[i * teams + team] = score[i];  // all the team's lanes the same
            }
            __syncthreads();  // the scores, written above, are read by all
            float raised = largest;
            for (int i = lane; i < min(batch, end - first); i += WARP) raised = fmaxf(raised, of_batch[i]);
            raised = warp_reduce(raised, Max());
            const float kept = __expf(largest - raised);
            largest = raised;
            total = __fmul_rn(total, kept);
#pragma unroll
            for (int k = 0; k < WIDTH; k++) sum[k] = __fmul_rn(sum[k], kept);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (first + i * teams + team >= end) continue;
                const float weight = __expf(score[i] - largest);
                total += weight;
                value[i].for_each([&](int k, float x) { sum[k] = fmaf(weight, x, sum[k]); });
            }
        }
        const int working = min(warps, (end - begin + WARP / LANES - 1) / (WARP / LANES));  // warps that had keys
        if (warp < working) {
#pragma unroll
            for (int offset = LANES; offset < WARP; offset *= 2) {
                total += __shfl_xor_sync(ALL_LANES, total, offset);
#pragma unroll
                for (int p = 0; p < Row::PARTS; p++) {
                    if (p * LANES * SIZE >= head_dim) break;  // the whole block
#pragma unroll
                    for (int k = p * SIZE; k < (p + 1) * SIZE; k++) sum[k] += __shfl_xor_sync(ALL_LANES, sum[k], offset);
                }
            }
            float* const own = of_warp + warp * (head_dim + 1);
            if (lane == 0) own[head_dim] = total;
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                const int d = Row::place(k / SIZE) + k % SIZE;
                if (lane < LANES && d < head_dim) own[d] = sum[k];
            }
        }
        __syncthreads();  // the warps' sums, written above, are added up below, a thread a feature
        for (int d = threadIdx.x; d <= head_dim; d += blockDim.x) {
            float x[MOST_WARPS], all = 0.0f;
#pragma unroll
            for (int i = 0; i < MOST_WARPS; i++) x[i] = i < working ? of_warp[i * (head_dim + 1) + d] : 0.0f;
#pragma unroll
            for (int i = 0; i < MOST_WARPS; i++) all += x[i];
            const int at = (row * a.heads + head) * SHARES + split;
            if (d < head_dim) publish(a.sum + at * head_dim + d, all, a.tag);
            else publish(a.state + 2 * at, largest, a.tag), publish(a.state + 2 * at + 1, all, a.tag);
        }
        __syncthreads();  // separates these reads of scratch from what is written there next
    }
}

// Elements d and on of a row and head's attended vector, SIZE of them (1 or 2); all loads are under way at once.
template <int SIZE, typename T, int ROWS>
void load_attended(float (&to)[SIZE], const Attention<T, ROWS>& a, int row, int head, int d) {
    const int place = (row * a.heads + head) * SHARES, visible = a.visible(row), share = a.share(row);
    float largest[SHARES], total[SHARES], sum[SHARES][SIZE], all_largest = minus_infinity(), all_total = 0.0f, all_sum[SIZE] = {};
    bool come;
    do {
        come = true;
#pragma unroll
        for (int i = 0; i < SHARES; i++) {
            float state[2] = {minus_infinity(), 0.0f};
            for (int j = 0; j < SIZE; j++) sum[i][j] = 0.0f;
            if (i * share < visible) {
                const bool sum_came = load_published(sum[i], a.sum + (place + i) * a.head_dim + d, a.tag);
                come = load_published(state, a.state + 2 * (place + i), a.tag) && sum_came && come;
            }
            largest[i] = state[0], total[i] = state[1];
        }
    } while (!come);
#pragma unroll
    for (int i = 0; i < SHARES; i++) all_largest = fmaxf(all_largest, largest[i]);
#pragma unroll
    for (int i = 0; i < SHARES; i++) {
        const float weight = __expf(largest[i] - all_largest);  // 0 where there is no such share
        all_total = fmaf(total[i], weight, all_total);
#pragma unroll
        for (int j = 0; j < SIZE; j++) all_sum[j] = fmaf(sum[i][j], weight, all_sum[j]);
    }
#pragma unroll
    for (int j = 0; j < SIZE; j++) to[j] = __fdividef(all_sum[j], all_total);
}
