// Cached attention within decode_step.cu: shares of the keys of each row and head, and the rows that they combine to.
//
//     s[j] = q . k[j] / sqrt(D)        a share: m = max s[j],  l = sum exp(s[j] - m),  o = sum exp(s[j] - m) v[j]
//     attended = sum exp(m - M) o / sum exp(m - M) l        over the shares, M being the largest m
//
// A row's keys are cut into at most SHARES shares of at least SMALLEST_SHARE keys. A block makes one share after another; LANES lanes take
// a key at a time, each a part of the features, with the next AHEAD keys under way. The keys of the first are on their way before the
// block waits for the queries: what the cache holds was written before this launch.
// The multiplications and additions are written out, see decode_step.cu on determinism.
#pragma once

#include "handover.cuh"

constexpr int SHARES = 4, SMALLEST_SHARE = 128;  // not tuned
constexpr int LANES = 16;                       // not tuned
constexpr int LARGEST_HEAD_DIM = 128;

inline float minus_infinity() { return __int_as_float(0xff800000); }

// keys and values (B, context, KV, D) of one layer, of T; the rest is handed over: qkv (rows, H + 2 KV, D), state (rows, H, SHARES, 2),
// m and l, and sum (rows, H, SHARES, D). rows = B * count.
template <typename T>
struct Attention {
    const Word* qkv;
    T *keys, *values;
    Word *state, *sum;
    unsigned qkv_tag, tag;  // of qkv, and of what is made of it
    int held, count, context, heads, kv_heads, head_dim;

    int width() const { return (heads + 2 * kv_heads) * head_dim; }
    int visible(int row) const { return held + row % count + 1; }
    int share(int row) const { return max((visible(row) + SHARES - 1) / SHARES, SMALLEST_SHARE); }
    long long cached(int row, int shared, int j) const {  // passes 2^31 with 64 rows of 2^25 elements
        return (((long long)(row / count) * context + j) * kv_heads + shared) * head_dim;
    }
    const Word* fresh(int row, int shared, int j) const {
        return qkv + (row / count * count + j - held) * width() + (heads + shared) * head_dim;
    }
};

// A lane's part of a row, (p * LANES + lane) * SIZE + i of which is element [p](i); zeros from head_dim on.
template <typename T, int SIZE>
struct Features {
    static constexpr int PARTS = LARGEST_HEAD_DIM / (LANES * SIZE);
    static constexpr int AHEAD = sizeof(Packed<T, SIZE>) < SIZE * sizeof(float) ? 4 : 2;  // not tuned
    Packed<T, SIZE> part[PARTS];

    static int place(int p) { return (p * LANES + threadIdx.x % LANES) * SIZE; }
    void load(const T* row, int head_dim) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            part[p].clear();
            if (place(p) < head_dim) part[p].load(row + place(p));
        }
    }
    // What is handed over holds numbers that T holds as well.
    void load_fresh(const Word* row, int head_dim, unsigned tag) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            part[p].clear();
            float x[SIZE];
            if (place(p) < head_dim) {
                while (!load_published(x, row + place(p), tag)) {}
                part[p].set([&](int j) { return x[j]; });
            }
        }
    }
};

// What a team, and then more of them, have seen.
template <int WIDTH>
struct Seen {
    float largest = minus_infinity(), total = 0.0f, sum[WIDTH] = {};

    // With what the lane `offset` away has seen; 0 where neither saw a key, for which exp(-inf - -inf) would be NaN.
    void merge(int offset) {
        const float other = __shfl_xor_sync(ALL_LANES, largest, offset), raised = fmaxf(largest, other);
        const float shift = raised == minus_infinity() ? 0.0f : raised;
        const float mine = __expf(largest - shift), theirs = __expf(other - shift);
        largest = raised;
        total = fmaf(total, mine, __fmul_rn(__shfl_xor_sync(ALL_LANES, total, offset), theirs));
#pragma unroll
        for (int i = 0; i < WIDTH; i++) sum[i] = fmaf(sum[i], mine, __fmul_rn(__shfl_xor_sync(ALL_LANES, sum[i], offset), theirs));
    }
};

// A block's shares of all rows and heads, and the new keys and values into the cache.
// scratch: warps * (D + 2) floats of shared memory.
template <typename T, int SIZE, int ROWS>
void make_shares(const Attention<T>& a, float* scratch) {
    using Row = Features<T, SIZE>;
    constexpr int AHEAD = Row::AHEAD;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP, head_dim = a.head_dim;
    const int team = threadIdx.x / LANES, teams = blockDim.x / LANES, group = a.heads / a.kv_heads;
    const float scale = 1.0f / sqrtf((float)head_dim);
    for (int unit = blockIdx.x; unit < SHARES * ROWS * a.heads; unit += gridDim.x) {
        const int split = unit / (ROWS * a.heads), row = unit / a.heads % ROWS, head = unit % a.heads, shared = head / group;
        const int begin = split * a.share(row), end = min(begin + a.share(row), a.visible(row));  // the keys begin <= j < end
        Row query;
        Seen<Row::PARTS * SIZE> seen;
#pragma unroll 1
        for (int first = begin; first < end; first += AHEAD * teams) {
            Row key[AHEAD], value[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int j = first + i * teams + team;
                if (j < min(a.held, end)) {
                    key[i].load(a.keys + a.cached(row, shared, j), head_dim);
                    value[i].load(a.values + a.cached(row, shared, j), head_dim);
                }
            }
            if (first == begin) query.load_fresh(a.qkv + row * a.width() + head * head_dim, head_dim, a.qkv_tag);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int j = first + i * teams + team;
                if (j >= a.held && j < end) {
                    key[i].load_fresh(a.fresh(row, shared, j), head_dim, a.qkv_tag);
                    value[i].load_fresh(a.fresh(row, shared, j) + a.kv_heads * head_dim, head_dim, a.qkv_tag);
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                float dot = 0.0f;
#pragma unroll
                for (int p = 0; p < Row::PARTS * SIZE; p++)
                    dot = fmaf(query.part[p / SIZE](p % SIZE), key[i].part[p / SIZE](p % SIZE), dot);
#pragma unroll
                for (int offset = LANES / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(ALL_LANES, dot, offset);
                if (first + i * teams + team >= end) continue;  // after the shuffles, in which the whole warp takes part
                const float score = __fmul_rn(dot, scale), raised = fmaxf(seen.largest, score);
                const float kept = __expf(seen.largest - raised), added = __expf(score - raised);
                seen.largest = raised;
                seen.total = fmaf(seen.total, kept, added);
#pragma unroll
                for (int p = 0; p < Row::PARTS * SIZE; p++)
                    seen.sum[p] = fmaf(added, value[i].part[p / SIZE](p % SIZE), __fmul_rn(seen.sum[p], kept));
            }
        }
        if (begin >= end) continue;  // the whole block
#pragma unroll
        for (int offset = LANES; offset < WARP; offset *= 2) seen.merge(offset);
        float* const of_warp = scratch + warp * (head_dim + 2);
        if (lane == 0) of_warp[0] = seen.largest, of_warp[1] = seen.total;
#pragma unroll
        for (int p = 0; p < Row::PARTS; p++)
#pragma unroll
            for (int i = 0; i < SIZE; i++)
                if (lane < LANES && Row::place(p) + i < head_dim) of_warp[2 + Row::place(p) + i] = seen.sum[p * SIZE + i];
        __syncthreads();  // the warps' shares, written above, are combined below, a thread a feature
        const int place = (row * a.heads + head) * SHARES + split;
        for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
            float largest = minus_infinity(), total = 0.0f, sum = 0.0f;  // finite in the end: a share has a key
#pragma unroll 2
            for (int i = 0; i < warps; i++) largest = fmaxf(largest, scratch[i * (head_dim + 2)]);
#pragma unroll 2
            for (int i = 0; i < warps; i++) {
                const float weight = __expf(scratch[i * (head_dim + 2)] - largest);
                total = fmaf(scratch[i * (head_dim + 2) + 1], weight, total);
                sum = fmaf(scratch[i * (head_dim + 2) + 2 + d], weight, sum);
            }
            if (split == 0 && head % group == 0) {  // before the share is there, after which qkv may be written anew
                const int position = a.held + row % a.count;
                const Word* const fresh = a.fresh(row, shared, position) + d;
                float key[1], value[1];
                while (!load_published(key, fresh, a.qkv_tag) || !load_published(value, fresh + a.kv_heads * head_dim, a.qkv_tag)) {}
                a.keys[a.cached(row, shared, position) + d] = from_float<T>(key[0]);
                a.values[a.cached(row, shared, position) + d] = from_float<T>(value[0]);
            }
            publish(a.sum + place * head_dim + d, sum, a.tag);
            if (d == 0) publish(a.state + 2 * place, largest, a.tag), publish(a.state + 2 * place + 1, total, a.tag);
        }
        __syncthreads();  // separates these reads of scratch from the next share's writes
    }
}

// Elements d and on of a row and head's attended vector, SIZE of them (1 or 2); all loads are under way at once.
template <int SIZE, typename T>
void load_attended(float (&to)[SIZE], const Attention<T>& a, int row, int head, int d) {
    const int place = (row * a.heads + head) * SHARES, shares = (a.visible(row) + a.share(row) - 1) / a.share(row);
    float largest[SHARES], total[SHARES], sum[SHARES][SIZE], all_largest = minus_infinity(), all_total = 0.0f, all_sum[SIZE] = {};
    bool come;
    do {
        come = true;
#pragma unroll
        for (int i = 0; i < SHARES; i++) {
            float state[2] = {minus_infinity(), 0.0f};
            for (int j = 0; j < SIZE; j++) sum[i][j] = 0.0f;
            if (i < shares) {
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
    for (int j = 0; j < SIZE; j++) to[j] = all_sum[j] / all_total;
}
