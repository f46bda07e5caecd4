// Split-KV attention over the cache, within decode_step.cu.
//
//     s[j] = q . k[j] / sqrt(D)
//     one split:   m = max s[j],  l = sum exp(s[j] - m),  o = sum exp(s[j] - m) v[j]
//     all splits:  M = max m,  attended = sum exp(m - M) o / sum exp(m - M) l
//
// Split: the keys that a row sees are cut into at most KV_SPLITS ranges of at least MIN_KEYS_PER_SPLIT keys.
// Block: computes one (split, row, head) after another, round-robin.
// Team:  TEAM_LANES lanes process one key at a time, each lane a part of the features. A team loads
//        KEYS_IN_FLIGHT keys at once and keeps its own m, l and o. Teams, then warps, are combined by the
//        formula for splits.
//
// Overlap: keys of the cache were written by earlier launches. So the first of them are loaded before the
//          block polls for the query.
// Determinism: every multiply-add is an explicit fmaf, see decode_step.cu.
// Source: the combination of splits, Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
#pragma once

#include "decode_model.cuh"
#include "inter_block.cuh"

// 8 splits were 6 % slower, splits of at least 128 keys equally fast: kernels/NOTES.md, fifth day.
constexpr int KV_SPLITS = 4, MIN_KEYS_PER_SPLIT = 64;
constexpr int TEAM_LANES = 8, TEAMS = THREADS / TEAM_LANES, TEAMS_PER_WARP = WARP / TEAM_LANES;  // not tuned

inline float minus_infinity() { return __int_as_float(0xff800000); }
// exp(m - M), the factor that rescales sums relative to m. It is 0 without keys, as exp(-inf - -inf) is NaN.
inline float rescale_factor(float m, float M) { return m == minus_infinity() ? 0.0f : __expf(m - M); }

// What the query and new keys still need in a model with QK-norm: the norm, then the rotation. Both need the
// whole head, whose parts come from several blocks. Weights (D,) or null: none. positions (rows,).
struct QkNorm {
    const float *query_weight, *key_weight, *table;
    const int* positions;
    float eps;
};

// Normalises and rotates a head as qk_norm.cu does. A thread holds 8 of its elements, from feature d on, and
// D / 8 neighbouring lanes hold all of them. `angles`: cosines and sines of the head's position.
template <int D, bool ROPE>
void norm_and_rotate(Packed<bf16, BF16_VEC>& x, int d, const float* weight, const float* angles, float eps) {
    constexpr int HEAD_LANES = D / BF16_VEC;
    static_assert(HEAD_LANES > 1 && WARP % HEAD_LANES == 0, "at least two lanes, all of one warp");
    const unsigned first_lane = threadIdx.x % WARP / HEAD_LANES * HEAD_LANES;
    const unsigned lane_mask = (ALL_LANES >> (WARP - HEAD_LANES)) << first_lane;
    float y[BF16_VEC], square_sum = 0.0f;
#pragma unroll
    for (int j = 0; j < BF16_VEC; j++) y[j] = x(j), square_sum = fmaf(y[j], y[j], square_sum);
#pragma unroll
    for (int offset = HEAD_LANES / 2; offset > 0; offset /= 2)
        square_sum += __shfl_xor_sync(lane_mask, square_sum, offset);
    const float rstd = rsqrtf(fmaf(square_sum, 1.0f / D, eps));
    const float sign = d < D / 2 ? -1.0f : 1.0f;  // of the sine: the first half loses, the second gains
#pragma unroll
    for (int j = 0; j < BF16_VEC; j++) {
        y[j] = __fmul_rn(y[j], rstd);
        if (weight) y[j] = __fmul_rn(y[j], weight[d + j]);
        if constexpr (ROPE) {
            const float partner = __shfl_xor_sync(lane_mask, y[j], HEAD_LANES / 2);
            const float cosine = angles[d % (D / 2) + j], sine = angles[D / 2 + d % (D / 2) + j];
            y[j] = fmaf(y[j], cosine, __fmul_rn(partner, __fmul_rn(sign, sine)));
        }
    }
    x.set([&](int j) { return y[j]; });
}

// keys and values (B, context, KV, D) of one layer. The rest are words exchanged between blocks
// (inter_block.cuh): qkv (rows, QKV_WIDTH / 2), two bf16 a word; split_stats (rows, H, KV_SPLITS, 2), m and
// l; split_out (rows, H, KV_SPLITS, D), o. rows = B * count.
template <typename M, int ROWS>
struct Attention {
    const Word* qkv;
    bf16 *keys, *values;
    Word *split_stats, *split_out;
    unsigned qkv_tag, split_tag;
    int cached_len, count, context;
    QkNorm qk_norm;  // used if M::QK_NORM

    int sequence(int row) const { return ROWS == 1 ? 0 : row / count; }
    int new_index(int row) const { return ROWS == 1 ? 0 : row % count; }  // among the sequence's new tokens
    int visible(int row) const { return cached_len + new_index(row) + 1; }
    int keys_per_split(int row) const {
        return max((visible(row) + KV_SPLITS - 1) / KV_SPLITS, MIN_KEYS_PER_SPLIT);
    }
    long long cache_offset(int row, int kv_head, int j) const {  // may exceed 2^31
        return (((long long)sequence(row) * context + j) * M::KV_HEADS + kv_head) * M::HEAD_DIM;
    }
};

// A lane's part of a vector of D features: VECS vectors of 8. Element [v](i) is feature (v * TEAM_LANES +
// lane) * 8 + i. Features beyond D are zero.
template <int D>
struct HeadFragment {
    static constexpr int VECS = ceil_div(D, TEAM_LANES * BF16_VEC), ELEMENTS = VECS * BF16_VEC;
    Packed<bf16, BF16_VEC> vec[VECS];

    static int feature(int v) { return (v * TEAM_LANES + threadIdx.x % TEAM_LANES) * BF16_VEC; }
    static bool in_range(int v) { return D % (TEAM_LANES * BF16_VEC) == 0 || feature(v) < D; }
    void load(const bf16* row) {
#pragma unroll
        for (int v = 0; v < VECS; v++) {
            vec[v].clear();
            if (in_range(v)) vec[v].load(row + feature(v));
        }
    }
    template <typename F>
    void for_each(F use) const {
#pragma unroll
        for (int v = 0; v < VECS; v++)
#pragma unroll
            for (int j = 0; j < BF16_VEC; j++) use(v * BF16_VEC + j, vec[v](j));
    }
};

// smem_qkv (1 + 2 * new keys, D) = the query of one row and head, then each new key and value from key
// `first` to `end`. All of them are polled for at once. The row's own key and value are also appended to the
// cache.
template <typename M, int ROWS>
void load_new_qkv(bf16* smem_qkv, const Attention<M, ROWS>& a, int row, int head, int kv_head, int first,
                  int end) {
    constexpr int D = M::HEAD_DIM, THREADS_PER_VECTOR = D / BF16_VEC;
    const int vectors = 1 + 2 * max(end - first, 0);
    for (int i = threadIdx.x; i < vectors * THREADS_PER_VECTOR; i += THREADS) {
        const int vector = i / THREADS_PER_VECTOR, d = i % THREADS_PER_VECTOR * BF16_VEC;
        const int j = first + (vector - 1) / 2;
        const bool is_query = vector == 0, is_key = vector % 2;
        const int source_row = is_query ? row : a.sequence(row) * a.count + j - a.cached_len;
        const int source_head = is_query ? head : M::HEADS + (is_key ? 0 : M::KV_HEADS) + kv_head;
        const Word* const source = a.qkv + (source_row * M::QKV_WIDTH + source_head * D + d) / 2;
        Packed<bf16, BF16_VEC> x;
        while (!load_published(x.word, source, a.qkv_tag)) {}
        if constexpr (M::QK_NORM) {
            const float* const weight = is_query ? a.qk_norm.query_weight : a.qk_norm.key_weight;
            const float* angles = a.qk_norm.table;
            if (M::ROPE) angles += (long long)a.qk_norm.positions[source_row] * D;
            if (is_query || is_key) norm_and_rotate<D, M::ROPE>(x, d, weight, angles, a.qk_norm.eps);
        }
        *reinterpret_cast<uint4*>(smem_qkv + vector * D + d) =
            make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]);
        // Only the first query head of a KV head appends.
        const bool appends = !is_query && j == a.visible(row) - 1 && head % (M::HEADS / M::KV_HEADS) == 0;
        if (appends) x.store((is_key ? a.keys : a.values) + a.cache_offset(row, kv_head, j) + d);
    }
}

// Shared memory of split_kv_attention: smem_qkv, and o, l and m of each warp.
template <typename M, int ROWS>
constexpr int ATTENTION_BYTES = (1 + 2 * ROWS) * M::HEAD_DIM * 2 + WARPS * (M::HEAD_DIM + 2) * 4;

// Publishes m, l and o of the block's (split, row, head) units, and appends the new keys and values to the
// cache.
template <typename M, int ROWS>
void split_kv_attention(const Attention<M, ROWS>& a, unsigned char* scratch) {
    constexpr int D = M::HEAD_DIM, KEY_STRIDE = M::KV_HEADS * D;
    using Fragment = HeadFragment<D>;
    // 4 keys in flight were slower than 2: kernels/NOTES.md, fifth day.
    constexpr int KEYS_IN_FLIGHT = Fragment::VECS == 1 ? 2 : 1;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, team = threadIdx.x / TEAM_LANES;
    const float scale = 1.0f / sqrtf((float)D);
    bf16* const smem_qkv = reinterpret_cast<bf16*>(scratch);
    float* const warp_partials = reinterpret_cast<float*>(smem_qkv + (1 + 2 * ROWS) * D);
    for (int unit = blockIdx.x; unit < KV_SPLITS * ROWS * M::HEADS; unit += M::BLOCKS) {
        const int split = unit / (ROWS * M::HEADS), row = unit % (ROWS * M::HEADS) / M::HEADS;
        const int head = unit % M::HEADS, kv_head = head / (M::HEADS / M::KV_HEADS);
        const int split_keys = a.keys_per_split(row);
        const int begin = split * split_keys, end = min(begin + split_keys, a.visible(row));
        if (begin >= end) continue;  // the whole block skips this unit, its barriers included
        const int first_new = max(begin, a.cached_len);
        const bf16* const keys = a.keys + a.cache_offset(row, kv_head, 0);
        const bf16* const values = a.values + a.cache_offset(row, kv_head, 0);
        Fragment query;
        float m = minus_infinity(), l = 0.0f, o[Fragment::ELEMENTS] = {};
#pragma unroll 1
        for (int first = begin; first < end; first += KEYS_IN_FLIGHT * TEAMS) {
            Fragment key[KEYS_IN_FLIGHT], value[KEYS_IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < KEYS_IN_FLIGHT; i++) {
                const int j = first + i * TEAMS + team;
                if (j < min(a.cached_len, end)) {
                    key[i].load(keys + (long long)j * KEY_STRIDE);
                    value[i].load(values + (long long)j * KEY_STRIDE);
                }
            }
            if (first == begin) {
                load_new_qkv(smem_qkv, a, row, head, kv_head, first_new, end);
                __syncthreads();  // separates the writes of smem_qkv from all reads of it
                query.load(smem_qkv);
            }
            float score[KEYS_IN_FLIGHT], new_m = m;
#pragma unroll
            for (int i = 0; i < KEYS_IN_FLIGHT; i++) {
                const int j = first + i * TEAMS + team;
                if (j >= first_new && j < end) {
                    key[i].load(smem_qkv + (1 + 2 * (j - first_new)) * D);
                    value[i].load(smem_qkv + (2 + 2 * (j - first_new)) * D);
                }
                float dots[2] = {};  // two independent chains of additions
                query.for_each([&](int k, float x) {
                    dots[k % 2] = fmaf(x, key[i].vec[k / BF16_VEC](k % BF16_VEC), dots[k % 2]);
                });
                float dot = dots[0] + dots[1];
#pragma unroll
                for (int offset = TEAM_LANES / 2; offset > 0; offset /= 2)
                    dot += __shfl_xor_sync(ALL_LANES, dot, offset);
                score[i] = j < end ? __fmul_rn(dot, scale) : minus_infinity();
                new_m = fmaxf(new_m, score[i]);
            }
            const float rescale = rescale_factor(m, new_m);
            m = new_m;
            l = __fmul_rn(l, rescale);
#pragma unroll
            for (int k = 0; k < Fragment::ELEMENTS; k++) o[k] = __fmul_rn(o[k], rescale);
#pragma unroll
            for (int i = 0; i < KEYS_IN_FLIGHT; i++) {
                if (first + i * TEAMS + team >= end) continue;
                const float p = __expf(score[i] - m);
                l += p;
                value[i].for_each([&](int k, float x) { o[k] = fmaf(p, x, o[k]); });
            }
        }
        const int active_warps = min(WARPS, ceil_div(end - begin, TEAMS_PER_WARP));  // warps that had keys
        if (warp < active_warps) {  // combine the warp's teams
            float warp_m = m;
#pragma unroll
            for (int offset = TEAM_LANES; offset < WARP; offset *= 2)
                warp_m = fmaxf(warp_m, __shfl_xor_sync(ALL_LANES, warp_m, offset));
            const float rescale = rescale_factor(m, warp_m);
            l = __fmul_rn(l, rescale);
#pragma unroll
            for (int k = 0; k < Fragment::ELEMENTS; k++) o[k] = __fmul_rn(o[k], rescale);
#pragma unroll
            for (int offset = TEAM_LANES; offset < WARP; offset *= 2) {
                l += __shfl_xor_sync(ALL_LANES, l, offset);
#pragma unroll
                for (int k = 0; k < Fragment::ELEMENTS; k++) o[k] += __shfl_xor_sync(ALL_LANES, o[k], offset);
            }
            float* const partial = warp_partials + warp * (D + 2);
            if (lane == 0) partial[D] = l, partial[D + 1] = warp_m;
#pragma unroll
            for (int k = 0; k < Fragment::ELEMENTS; k++)
                if (lane < TEAM_LANES && Fragment::in_range(k / BF16_VEC))
                    partial[Fragment::feature(k / BF16_VEC) + k % BF16_VEC] = o[k];
        }
        __syncthreads();  // separates the writes of warp_partials from the reads below
        // Combine the warps: thread d sums feature d of o, thread D sums l.
        for (int d = threadIdx.x; d <= D; d += THREADS) {
            float ms[WARPS], x[WARPS], block_m = minus_infinity(), sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) {
                const float* const partial = warp_partials + i * (D + 2);
                ms[i] = i < active_warps ? partial[D + 1] : minus_infinity();
                x[i] = i < active_warps ? partial[d] : 0.0f;
                block_m = fmaxf(block_m, ms[i]);
            }
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum = fmaf(x[i], rescale_factor(ms[i], block_m), sum);
            const int index = (row * M::HEADS + head) * KV_SPLITS + split;
            if (d < D) {
                publish(a.split_out + index * D + d, sum, a.split_tag);
            } else {
                publish(a.split_stats + 2 * index, block_m, a.split_tag);
                publish(a.split_stats + 2 * index + 1, sum, a.split_tag);
            }
        }
        __syncthreads();  // separates the reads of warp_partials from the next writes of scratch
    }
}

// Elements d and d + 1 of the attended vector of a row and head. Polls for all splits at once.
template <typename M, int ROWS>
float2 combine_splits(const Attention<M, ROWS>& a, int row, int head, int d) {
    const int index = (row * M::HEADS + head) * KV_SPLITS, visible = a.visible(row);
    const int split_keys = a.keys_per_split(row);
    float stats[KV_SPLITS][2], o[KV_SPLITS][2];  // stats: m and l
    float max_m = minus_infinity(), total = 0.0f, x = 0.0f, y = 0.0f;
    bool ready;
    do {
        ready = true;
#pragma unroll
        for (int i = 0; i < KV_SPLITS; i++) {
            stats[i][0] = minus_infinity(), stats[i][1] = o[i][0] = o[i][1] = 0.0f;
            if (i * split_keys >= visible) continue;  // no keys: nobody publishes this split
            const Word* const out = a.split_out + (index + i) * M::HEAD_DIM + d;
            const bool out_ready = load_published(o[i], out, a.split_tag);
            const Word* const stats_words = a.split_stats + 2 * (index + i);
            ready = load_published(stats[i], stats_words, a.split_tag) && out_ready && ready;
        }
    } while (!ready);
#pragma unroll
    for (int i = 0; i < KV_SPLITS; i++) max_m = fmaxf(max_m, stats[i][0]);
#pragma unroll
    for (int i = 0; i < KV_SPLITS; i++) {
        const float rescale = rescale_factor(stats[i][0], max_m);
        total = fmaf(stats[i][1], rescale, total);
        x = fmaf(o[i][0], rescale, x), y = fmaf(o[i][1], rescale, y);
    }
    return make_float2(__fdividef(x, total), __fdividef(y, total));
}
