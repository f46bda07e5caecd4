// Cached attention within decode_step.cu: shares of the keys of each row and head, and the rows that they combine to.
//
//     s[j] = q . k[j] / sqrt(D)        a share: m = max s[j],  l = sum exp(s[j] - m),  o = sum exp(s[j] - m) v[j]
//     attended = sum exp(m - M) o / sum exp(m - M) l        over the shares, M being the largest m
//
// A row's keys are cut into at most SHARES shares of at least SMALLEST_SHARE keys. A block makes one share after another; a team of
// LANES lanes takes a key at a time, each lane a part of the features, AHEAD keys at once, and keeps an m, l and o of its own; they are
// combined as the shares are. The first keys are on their way before the block waits for the queries: what the cache holds was
// written before this launch. The multiplications and additions are written out, see decode_step.cu on determinism.
#pragma once

#include "decode_model.cuh"
#include "inter_block.cuh"

constexpr int SHARES = 4, SMALLEST_SHARE = 64;  // 8 took longer, 128 as long
constexpr int LANES = 8, TEAMS = THREADS / LANES, OF_WARP = WARP / LANES;

inline float minus_infinity() { return __int_as_float(0xff800000); }
// What a part of keys whose largest score is m counts beside one whose largest is M; 0 of a part without keys.
inline float share_weight(float m, float M) { return m == minus_infinity() ? 0.0f : __expf(m - M); }

// keys and values (B, context, KV, D) of one layer; the rest is handed over: qkv (rows, WIDTH / 2), two bf16 a word, state (rows, H,
// SHARES, 2), m and l, and sum (rows, H, SHARES, D). rows = B * count.
template <typename M, int ROWS>
struct Attention {
    const Word* qkv;
    bf16 *keys, *values;
    Word *state, *sum;
    unsigned qkv_tag, tag;  // of qkv, and of what is made of it
    int held, count, context;

    int sequence(int row) const { return ROWS == 1 ? 0 : row / count; }
    int behind(int row) const { return ROWS == 1 ? 0 : row % count; }  // the cache's last
    int visible(int row) const { return held + behind(row) + 1; }
    int share(int row) const { return max((visible(row) + SHARES - 1) / SHARES, SMALLEST_SHARE); }
    long long cached(int row, int shared, int j) const {  // may pass 2^31
        return (((long long)sequence(row) * context + j) * M::KV_HEADS + shared) * M::HEAD_DIM;
    }
};

// A lane's part of a row of D features, (p * LANES + lane) * VECTOR + i of which is element [p](i); zeros beyond D.
template <int D>
struct Features {
    static constexpr int PARTS = parts(D, LANES * VECTOR), WIDTH = PARTS * VECTOR;
    Packed<bf16, VECTOR> part[PARTS];

    static int place(int p) { return (p * LANES + threadIdx.x % LANES) * VECTOR; }
    static bool within(int p) { return D % (LANES * VECTOR) == 0 || place(p) < D; }
    void load(const bf16* row) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            part[p].clear();
            if (within(p)) part[p].load(row + place(p));
        }
    }
    template <typename F>
    void for_each(F use) const {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int j = 0; j < VECTOR; j++) use(p * VECTOR + j, part[p](j));
    }
};

// handed (1 + 2 * fresh keys, D) = the query of a row and head, and from key j = `first` on to `end` each new key and value, for
// which the block waits all at once. What is the row's own comes into the cache as well.
template <typename M, int ROWS>
void take_fresh(bf16* handed, const Attention<M, ROWS>& a, int row, int head, int shared, int first, int end) {
    constexpr int D = M::HEAD_DIM, OF_ROW = D / VECTOR;  // threads
    for (int i = threadIdx.x; i < (1 + 2 * max(end - first, 0)) * OF_ROW; i += THREADS) {
        const int which = i / OF_ROW, d = i % OF_ROW * VECTOR, j = first + (which - 1) / 2;
        const bool query = which == 0, key = which % 2;
        const int from_row = query ? row : a.sequence(row) * a.count + j - a.held;
        const int from_head = query ? head : M::HEADS + (key ? 0 : M::KV_HEADS) + shared;
        const Word* const from = a.qkv + (from_row * M::WIDTH + from_head * D + d) / 2;
        Packed<bf16, VECTOR> x;
        while (!load_published(x.word, from, a.qkv_tag)) {}
        *reinterpret_cast<uint4*>(handed + which * D + d) = make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]);
        const bool appends = !query && j == a.visible(row) - 1 && head % (M::HEADS / M::KV_HEADS) == 0;  // the first head that shares it
        if (appends) x.store((key ? a.keys : a.values) + a.cached(row, shared, j) + d);
    }
}

// Of shared memory that make_shares works with: `handed`, and each warp's o, l and m.
template <typename M, int ROWS>
constexpr int SHARES_BYTES = (1 + 2 * ROWS) * M::HEAD_DIM * 2 + WARPS * (M::HEAD_DIM + 2) * 4;

// A block's shares of all rows and heads, and the new keys and values into the cache.
template <typename M, int ROWS>
void make_shares(const Attention<M, ROWS>& a, unsigned char* scratch) {
    constexpr int D = M::HEAD_DIM, STRIDE = M::KV_HEADS * D;
    using Row = Features<D>;
    constexpr int AHEAD = Row::PARTS == 1 ? 2 : 1;  // 4 keys at once took longer
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, team = threadIdx.x / LANES;
    const float scale = 1.0f / sqrtf((float)D);
    bf16* const handed = reinterpret_cast<bf16*>(scratch);
    float* const warp_partials = reinterpret_cast<float*>(handed + (1 + 2 * ROWS) * D);
    for (int unit = blockIdx.x; unit < SHARES * ROWS * M::HEADS; unit += M::BLOCKS) {
        const int split = unit / (ROWS * M::HEADS), row = unit % (ROWS * M::HEADS) / M::HEADS, head = unit % M::HEADS;
        const int shared = head / (M::HEADS / M::KV_HEADS), share = a.share(row);
        const int begin = split * share, end = min(begin + share, a.visible(row));  // the keys begin <= j < end
        if (begin >= end) continue;  // the whole block
        const int fresh = max(begin, a.held);
        const bf16 *const keys = a.keys + a.cached(row, shared, 0), *const values = a.values + a.cached(row, shared, 0);
        Row query;
        float largest = minus_infinity(), total = 0.0f, sum[Row::WIDTH] = {};
#pragma unroll 1
        for (int first = begin; first < end; first += AHEAD * TEAMS) {
            Row key[AHEAD], value[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int j = first + i * TEAMS + team;
                if (j < min(a.held, end)) {
                    key[i].load(keys + (long long)j * STRIDE);
                    value[i].load(values + (long long)j * STRIDE);
                }
            }
            if (first == begin) {
                take_fresh(handed, a, row, head, shared, fresh, end);
                __syncthreads();  // what was handed over, written above, is read by all
                query.load(handed);
            }
            float score[AHEAD], raised = largest;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int j = first + i * TEAMS + team;
                if (j >= fresh && j < end) {
                    key[i].load(handed + (1 + 2 * (j - fresh)) * D);
                    value[i].load(handed + (2 + 2 * (j - fresh)) * D);
                }
                float dots[2] = {};  // a chain each
                query.for_each([&](int k, float x) { dots[k % 2] = fmaf(x, key[i].part[k / VECTOR](k % VECTOR), dots[k % 2]); });
                float dot = dots[0] + dots[1];
#pragma unroll
                for (int offset = LANES / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(ALL_LANES, dot, offset);
                score[i] = j < end ? __fmul_rn(dot, scale) : minus_infinity();
                raised = fmaxf(raised, score[i]);
            }
            const float kept = share_weight(largest, raised);
            largest = raised;
            total = __fmul_rn(total, kept);
#pragma unroll
            for (int k = 0; k < Row::WIDTH; k++) sum[k] = __fmul_rn(sum[k], kept);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (first + i * TEAMS + team >= end) continue;
                const float weight = __expf(score[i] - largest);
                total += weight;
                value[i].for_each([&](int k, float x) { sum[k] = fmaf(weight, x, sum[k]); });
            }
        }
        const int working = min(WARPS, parts(end - begin, OF_WARP));  // warps that had keys
        if (warp < working) {
            float of_all = largest;
#pragma unroll
            for (int offset = LANES; offset < WARP; offset *= 2) of_all = fmaxf(of_all, __shfl_xor_sync(ALL_LANES, of_all, offset));
            const float weight = share_weight(largest, of_all);
            total = __fmul_rn(total, weight);
#pragma unroll
            for (int k = 0; k < Row::WIDTH; k++) sum[k] = __fmul_rn(sum[k], weight);
#pragma unroll
            for (int offset = LANES; offset < WARP; offset *= 2) {
                total += __shfl_xor_sync(ALL_LANES, total, offset);
#pragma unroll
                for (int k = 0; k < Row::WIDTH; k++) sum[k] += __shfl_xor_sync(ALL_LANES, sum[k], offset);
            }
            float* const own = warp_partials + warp * (D + 2);
            if (lane == 0) own[D] = total, own[D + 1] = of_all;
#pragma unroll
            for (int k = 0; k < Row::WIDTH; k++)
                if (lane < LANES && Row::within(k / VECTOR)) own[Row::place(k / VECTOR) + k % VECTOR] = sum[k];
        }
        __syncthreads();  // the warps' sums, written above, are added up below, a thread a feature
        for (int d = threadIdx.x; d <= D; d += THREADS) {
            float m[WARPS], x[WARPS], of_all = minus_infinity(), all = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) {
                const float* const own = warp_partials + i * (D + 2);
                m[i] = i < working ? own[D + 1] : minus_infinity(), x[i] = i < working ? own[d] : 0.0f;
                of_all = fmaxf(of_all, m[i]);
            }
#pragma unroll
            for (int i = 0; i < WARPS; i++) all = fmaf(x[i], share_weight(m[i], of_all), all);
            const int at = (row * M::HEADS + head) * SHARES + split;
            if (d < D) publish(a.sum + at * D + d, all, a.tag);
            else publish(a.state + 2 * at, of_all, a.tag), publish(a.state + 2 * at + 1, all, a.tag);
        }
        __syncthreads();  // separates these reads of scratch from what is written there next
    }
}

// Elements d and d + 1 of a row and head's attended vector; all loads are under way at once.
template <typename M, int ROWS>
float2 load_attended(const Attention<M, ROWS>& a, int row, int head, int d) {
    const int place = (row * M::HEADS + head) * SHARES, visible = a.visible(row), share = a.share(row);
    float state[SHARES][2], sum[SHARES][2], of_all = minus_infinity(), total = 0.0f, x = 0.0f, y = 0.0f;
    bool come;
    do {
        come = true;
#pragma unroll
        for (int i = 0; i < SHARES; i++) {
            state[i][0] = minus_infinity(), state[i][1] = sum[i][0] = sum[i][1] = 0.0f;
            if (i * share >= visible) continue;
            const bool sum_came = load_published(sum[i], a.sum + (place + i) * M::HEAD_DIM + d, a.tag);
            come = load_published(state[i], a.state + 2 * (place + i), a.tag) && sum_came && come;
        }
    } while (!come);
#pragma unroll
    for (int i = 0; i < SHARES; i++) of_all = fmaxf(of_all, state[i][0]);
#pragma unroll
    for (int i = 0; i < SHARES; i++) {
        const float weight = share_weight(state[i][0], of_all);
        total = fmaf(state[i][1], weight, total);
        x = fmaf(sum[i][0], weight, x), y = fmaf(sum[i][1], weight, y);
    }
    return make_float2(__fdividef(x, total), __fdividef(y, total));
}
