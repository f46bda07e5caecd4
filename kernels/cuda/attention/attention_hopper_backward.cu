// Gradient of attention_hopper.cu, the probabilities computed again from lse: one kernel, five products. bf16, head dims 64 and
// 128.
//
// The mathematics and the layout of the arrays are attention_scalar.cu's, delta comes from its attention_delta:
//
//     p[t, j]  = exp(s[t, j] - lse[t])        ds[t, j] = p[t, j] * (dout[t] . v[j] - delta[t]) / sqrt(D)
//     dq[t] = sum_j ds[t, j] k[j]             dk[j] = sum_t ds[t, j] q[t]             dv[j] = sum_t p[t, j] dout[t]
//
// Work: a block stays on its multiprocessor and takes item after item: KEYS keys of one head. It walks over all query heads that
//       share them and over the tiles of QUERIES queries that see them, upward from the diagonal. Two warpgroups own 64 of the
//       keys each, with dk and dv in their registers. Of the third one warp takes items and copies, two tiles ahead and on into
//       the next item, q, dout, lse, delta and start, and two pass dq on.
// Next item: at D = 64 keys with values are as large as ds, of which there are two: the next item's are copied to the one that
//       the last step does not use, while that runs. dk and dv leave from where the old keys and values were, and so do they at
//       D = 128, where the next come to the same places afterwards.
// Products: s and dout . v are computed transposed, keys by queries: so p and ds are left factors of dv and dk as they lie in
//       the registers. Only ds goes to shared memory, where each warpgroup multiplies all KEYS of it with the keys: at D = 64
//       for its 64 of the queries, at D = 128 for its 64 of the features. The next tile's s is computed while dq leaves.
// dq: a tile's sum lies in `dq_sum` in fp32, each 64 x 64 part of it in the order of the threads' fragments. The blocks of keys
//       contribute from the diagonal down, each when `turns` says that the one before it has: the diagonal's stores, so nothing
//       is zeroed but the turns; the copy engine adds the others'; the lowest adds to what it reads, rounds, and writes dqkv.
//       Items are taken in order, from a counter, as blockIdx promises none; those of one head go from the last keys to the
//       first, and all start at their diagonals, so that one is a tile ahead of the next and nobody waits for long.
// dbias: the sum of dqkv's rows, where asked for, without reading them again. An item's share of it goes to its GROUPS rows of
//       `partial` (batch, tiles of keys, GROUPS, width of dqkv), which columns.cu adds up: each warpgroup sums its dk and dv, as
//       they lie to be copied, and the warps that pass dq on sum what they round, over the tiles of a query head.
// No deadlock: an item waits for items of lower numbers only. A block works on its items in order, and what it copies ahead waits
//       for no other block. So of all items that are not done the lowest one waits for nobody, and is worked on: its block has
//       done those before it.
// End: all warps of a block end together, when its last copies and the last arrivals at its barriers are over, as another block's
//       barriers may lie in the same places.
// Skipped: tiles that no key of the item takes part in; only tiles on a border are masked element by element.
// Registers: what is in flight at a time is chosen so that none spills. A sum in flight over the loop's end, or a branch between
//       two groups of products, makes the compiler wait after each product ("serialized" in its log, which a test looks for).
//       Addresses of tiles follow from warp_number, so that they are in registers that a warp has once.
// Precision: products of bf16 with fp32 sums; exp, lse and delta fp32; p and ds are rounded to bf16 as factors, of ds p, too, and
//       dq, dk and dv as they are stored. exp is 2^x with log2(e) folded into the scale. partial: of dk and dv as they are
//       rounded, of dq before.
// Determinism: every sum has a fixed order, dq's by the turns, and each element of `partial` is one item's; the counter decides
//       which block does what, not what is done. Where not `ordered`, the blocks between a tile's first and last add to dq as
//       they come.
// Source: Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3), section 3 and its supplement's algorithm 3; Dao 2023,
//       arXiv:2307.08691, algorithm 2.
//
// Numbers of rows, tiles, stages and registers: not tuned.

#include "attention_hopper_backward.cuh"

// Keys by queries: the scores of keys that a query does not see become -inf. `key`: the lane's first row, and `query_first`, both
// from the item's first key on, as `begins` counts.
template <int TILE>
void hide_unseen(float (&s)[TILE / 2], int key, int query_first, const unsigned char* begins) {
#pragma unroll
    for (int i = 0; i < TILE / 2; i += 4)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int column = i * 2 + threadIdx.x % 4 * 2 + odd;
            const int lowest = begins[column] - key, highest = query_first + column - key;
#pragma unroll
            for (int half = 0; half < 2; half++)
                if ((8 * half < lowest) | (8 * half > highest)) s[i + 2 * half + odd] = minus_infinity();
        }
}

// Start product = rows of the warpgroup's keys or values by those of a tile of queries; `own` is a descriptor.
template <int HEAD_DIM>
void multiply_rows(float (&product)[QUERIES<HEAD_DIM> / 2], unsigned long long own, unsigned tile) {
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++)
        wgmma_ss(product, advance(own, k / 4 * KEYS * TILE_ROW_BYTES + k % 4 * 32),
                       advance(tile_descriptor(tile), k / 4 * QUERIES<HEAD_DIM> * TILE_ROW_BYTES + k % 4 * 32), k > 0);
    wgmma_commit();
}

// Start sum += left times a tile of queries.
template <int PARTS, int COUNT>
void add_weighted(float (&sum)[PARTS][32], const unsigned (&left)[COUNT][4], unsigned tile) {
#pragma unroll
    for (int k = 0; k < COUNT; k++)
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            wgmma_rs(sum[i], left[k], advance(tile_descriptor(tile), (i * COUNT + k) * 16 * TILE_ROW_BYTES));
    wgmma_commit();
}

// Scores to probabilities, rounded as a left factor too.
template <int COUNT>
void weigh(float (&s)[8 * COUNT], unsigned (&left)[COUNT][4], const float* row_lse, float scale2) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
#pragma unroll
        for (int i = 8 * k; i < 8 * k + 8; i += 4) {
            const float2 lse = *reinterpret_cast<const float2*>(row_lse + i * 2);
#pragma unroll
            for (int e = i; e < i + 4; e++) s[e] = exp2_approx(s[e] * scale2 - (e % 2 ? lse.y : lse.x));
        }
        round_fragment(left[k], s, k);
    }
}

// dout . v to ds, with the probabilities as they are rounded: there is no room for both.
template <int COUNT>
void subtract_delta(float (&dp)[8 * COUNT], const unsigned (&left)[COUNT][4], const float* row_delta) {
#pragma unroll
    for (int i = 0; i < 8 * COUNT; i += 4) {
        const float2 delta = *reinterpret_cast<const float2*>(row_delta + i * 2);
#pragma unroll
        for (int e = i; e < i + 4; e += 2) {
            const unsigned p = left[e / 8][e / 2 % 4];
            dp[e] = __uint_as_float(p << 16) * (dp[e] - delta.x);
            dp[e + 1] = __uint_as_float(p & 0xffff0000) * (dp[e + 1] - delta.y);
        }
    }
}

// ds, rounded, as a left factor and to the warpgroup's rows of its place.
template <int COUNT>
void store_ds(unsigned (&left)[COUNT][4], const float (&ds)[8 * COUNT], unsigned own_rows) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        round_fragment(left[k], ds, k);
        store_fragment(own_rows + k / 4 * KEYS * TILE_ROW_BYTES, k % 4, left[k]);
    }
    fence_async_proxy();
}

// Start dq = ds times keys, the warpgroup's shares of which are descriptors.
inline void multiply_ds(float (&dq)[32], unsigned long long ds, unsigned long long keys) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        wgmma_ss<true, true>(dq, advance(ds, k * 16 * TILE_ROW_BYTES), advance(keys, k * 16 * TILE_ROW_BYTES), k > 0);
    wgmma_commit();
}

// A tile's dq to the warp that passes it on.
inline void hand_dq_over(const float (&dq)[32], float4* place, unsigned full) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        place[i * WARPGROUP + threadIdx.x % WARPGROUP] = float4{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
    fence_async_proxy();
    __syncwarp();  // the warp's share is written
    if (threadIdx.x % WARP == 0) arrive(full);
}

// A warpgroup's dk and dv of an item, through its own rows of the keys' and values' places, and their share of `partial`.
template <int HEAD_DIM, int PARTS>
void store_results(float (&dkey)[PARTS][32], float (&dvalue)[PARTS][32], const TensorMap& dqkv_map, float* partial,
                   unsigned keys, unsigned values, const Item& item, int length, int heads, int kv_heads, float scale) {
    constexpr int OWN = GROUP_ROWS * TILE_ROW_BYTES;
    const int group = threadIdx.x / WARPGROUP, first = item.first + group * GROUP_ROWS, head = heads + item.shared;
    const unsigned own_keys = keys + group * PARTS * OWN, own_values = values + group * PARTS * OWN;
    named_barrier_sync(1, ALL_GROUPS);  // nobody reads keys or ds any more
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        warpgroup_fence_operand(dkey[i]);
        warpgroup_fence_operand(dvalue[i]);
#pragma unroll
        for (int e = 0; e < 32; e++) dkey[i][e] *= scale;
        store_sum(own_keys + i * OWN, dkey[i]);
        store_sum(own_values + i * OWN, dvalue[i]);
    }
    fence_async_proxy();
    named_barrier_sync(2 + group, WARPGROUP);  // the results, written above by all, are copied by one and summed by all
    if (threadIdx.x % WARPGROUP == 0) {
        store_rows<HEAD_DIM>(dqkv_map, own_keys, head, first, item.b);
        store_rows<HEAD_DIM>(dqkv_map, own_values, head + kv_heads, first, item.b);
    }
    if (!partial) return;
    // Nobody writes to their places until all warps have read: where items rotate, not before the next one's first named_barrier_sync,
    // else not before give_back.
    float* sums = item.row(partial, group, length, (heads + 2 * kv_heads) * HEAD_DIM) + head * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        sum_columns(sums + i * 64, own_keys + i * OWN);
        sum_columns(sums + kv_heads * HEAD_DIM + i * 64, own_values + i * OWN);
    }
}

// A warpgroup: the products, of its 64 keys of each item.
template <int HEAD_DIM>
void multiply(const Layout<HEAD_DIM>& at, const TensorMap& dqkv_map, float* partial, unsigned char* memory, int length,
              int heads, int kv_heads, float scale) {
    constexpr int TILE = QUERIES<HEAD_DIM>, PARTS = HEAD_DIM / 64, KEY_PART = KEYS * TILE_ROW_BYTES;
    constexpr int OWN = GROUP_ROWS * TILE_ROW_BYTES;
    const int group = warp_number() * WARP / WARPGROUP;
    const int thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % WARP;
    const float scale2 = scale * LOG2_E, *rows = reinterpret_cast<float*>(memory + (at.rows - at.keys));
    const unsigned char* begins = memory + (at.begins - at.keys);
    float s[TILE / 2] = {}, dp[TILE / 2] = {}, dq[32] = {};
    unsigned left[TILE / 16][4];
    Places<HEAD_DIM> places(at);
    unsigned step = 0;  // of all items
    const auto start_scores = [&](unsigned long long own_keys) {
        wait(at.query_full[step % STAGES], step / STAGES % 2);
        wgmma_fence();
        multiply_rows<HEAD_DIM>(s, own_keys, at.queries + step % STAGES * at.QUERY_BYTES);
    };
    for (unsigned round = 0;; round++) {
        const Item& item = receive_item(at, round);
        if (item.tiles == 0) return;
        const unsigned keys = places.keys, values = keys + at.KEY_BYTES;
        const unsigned long long own_keys = tile_descriptor(keys + group * OWN);
        const unsigned long long own_values = tile_descriptor(values + group * OWN);
        // Its share of dq: queries or features.
        const unsigned long long dq_keys = tile_descriptor(keys + (PARTS == 2) * group * KEY_PART);
        float dkey[PARTS][32] = {}, dvalue[PARTS][32] = {};
        start_scores(own_keys);
        if (ROTATE<HEAD_DIM>) {
            give_back(at);
            if (thread == 0) bulk_wait_read();  // the last results have left what is ds from the second step on
        }
        wait(at.key_full[1], round % 2);
        wgmma_wait<0>();
        warpgroup_fence_operand(s);
        int query = 0;  // the tile's first, from the item's first key on
        for (const unsigned end = step + item.steps(); step < end;) {
            const unsigned stage = step % STAGES;
            const unsigned queries = at.queries + stage * at.QUERY_BYTES, douts = at.douts + stage * at.QUERY_BYTES;
            const float* row_lse = rows + stage * 2 * TILE + lane % 4 * 2;
            wait(at.dout_full[stage], step / STAGES % 2);
            wgmma_fence();
            multiply_rows<HEAD_DIM>(dp, own_values, douts);
            const unsigned char* begin = begins + stage * TILE;
            if (query < group * GROUP_ROWS + GROUP_ROWS - 1 || begin[TILE - 1] > group * GROUP_ROWS)
                hide_unseen<TILE>(s, group * GROUP_ROWS + thread / WARP * 16 + lane / 4, query, begin);
            weigh(s, left, row_lse, scale2);
            wgmma_fence();
            add_weighted(dvalue, left, douts);
            wgmma_wait<1>();
            warpgroup_fence_operand(dp);
            subtract_delta(dp, left, row_lse + TILE);
            // The other warpgroup has multiplied the ds of two steps ago: it has been past the last step's named_barrier_sync.
            wgmma_wait<0>();
            store_ds(left, dp, places.ds + group * OWN);
            wgmma_fence();
            add_weighted(dkey, left, queries);
            named_barrier_sync(1, ALL_GROUPS);  // all of ds is there
            wgmma_fence();
            multiply_ds(dq, tile_descriptor(places.ds + (PARTS == 1) * group * KEY_PART), dq_keys);
            wgmma_wait<1>();
            if (lane == 0) arrive(at.empty[stage]);
            step++;
            start_scores(own_keys);  // after the last step for nothing: a branch here would serialise
            wait(at.dq_empty[group], step % 2);
            wgmma_wait<1>();
            warpgroup_fence_operand(dq);
            hand_dq_over(dq, reinterpret_cast<float4*>(memory + (at.dq - at.keys) + group * at.DQ_BYTES), at.dq_full[group]);
            wgmma_wait<0>();
            warpgroup_fence_operand(s);
            places.next_step();
            query = query + TILE == item.tiles * TILE ? 0 : query + TILE;  // of the next head
        }
        wgmma_wait<0>();
        store_results<HEAD_DIM>(dkey, dvalue, dqkv_map, partial, keys, values, item, length, heads, kv_heads, scale);
        if (!ROTATE<HEAD_DIM>) {
            if (thread == 0) bulk_wait_read();
            give_back(at);
        }
        places.next_item();
    }
}

// Grid: a block a multiprocessor, at most one an item. turns and taken, the items taken, are zero. partial may be null.
template <int HEAD_DIM>
__global__ void __launch_bounds__((GROUPS + 1) * WARPGROUP, 1)
    attention_backward(const __grid_constant__ TensorMap dqkv_map, const __grid_constant__ TensorMap dout_map,
                       const __grid_constant__ TensorMap qkv_map, bf16* dqkv, float* partial, float* dq_sum, int* turns,
                       int* taken, const float* delta, const float* lse, const int* start, int batch, int length, int heads,
                       int kv_heads, bool ordered, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Layout<HEAD_DIM> at(memory);
    if (threadIdx.x == 0) at.init();
    __syncthreads();  // the barriers are ready
    const int warp = warp_number() - ALL_GROUPS / WARP;
    if (warp < 0) {
        warpgroup_reg_alloc<224>();
        multiply(at, dqkv_map, partial, memory, length, heads, kv_heads, scale);
        if (threadIdx.x % WARPGROUP == 0) bulk_wait();  // they read this block's memory
    } else {
        warpgroup_reg_dealloc<56>();
        if (warp == 0)
            copy_items(at, dout_map, qkv_map, memory, taken, delta, lse, start, batch, length, heads, kv_heads);
        else if (warp <= GROUPS)
            pass_dq(at, warp - 1, memory, dqkv, dq_sum, turns, partial, start, length, heads, kv_heads, ordered, scale);
    }
    __syncthreads();  // all end together
}
