// Gradient of attention_hopper.cu, the probabilities computed again from lse: one kernel, five products. bf16, head dims 64 and
// 128.
//
// The mathematics and the layout of the arrays are attention_scalar.cu's, delta comes from its attention_delta:
//
//     p[t, j]  = exp(s[t, j] - lse[t])        ds[t, j] = p[t, j] * (dout[t] . v[j] - delta[t]) / sqrt(D)
//     dq[t] = sum_j ds[t, j] k[j]             dk[j] = sum_t ds[t, j] q[t]             dv[j] = sum_t p[t, j] dout[t]
//
// Work: a block owns KEYS keys of one head, and walks over all query heads that share them and over the tiles of QUERIES queries
//       that see them, upward from the diagonal. Two warpgroups own 64 of the keys each, with dk and dv in their registers.
//       Of the third one warp copies q, dout, lse, delta and start of the tiles ahead, and two pass dq on.
// Products: s and dout . v are computed transposed, keys by queries: so p and ds are left factors of dv and dk as they lie in
//       the registers. Only ds goes to shared memory, where each warpgroup multiplies all KEYS of it with the keys: at D = 64
//       for its 64 of the queries, at D = 128 for its 64 of the features. The next tile's s is computed while dq leaves.
// dq: a tile's sum lies in `dq_sum` in fp32, each 64 x 64 part of it in the order of the threads' fragments. The blocks of keys
//       contribute from the diagonal down, each when `turns` says that the one before it has: the diagonal's stores, so nothing
//       is zeroed but the turns; the copy engine adds the others'; the lowest adds to what it reads, rounds, and writes dqkv.
//       Blocks take numbers as they start, from a counter, as blockIdx promises no order; those of one head go from the last keys
//       to the first, so each waits for a block that has started before it; and all start at their diagonals, so that one is a
//       tile ahead of the next and nobody waits for long.
// End: all warps of a block end together, when its last copies and the last arrivals at its barriers are over, as the next block's
//       barriers may lie in the same places.
// Skipped: tiles that no key of the block takes part in; only tiles on a border are masked element by element.
// Registers: what is in flight at a time is chosen so that none spills. A sum in flight over the loop's end, or a branch between
//       two groups of products, makes the compiler wait after each product ("serialized" in its log, which a test looks for).
// Precision: products of bf16 with fp32 sums; exp, lse and delta fp32; p and ds are rounded to bf16 as factors, of ds p, too, and
//       dq, dk and dv as they are stored. exp is 2^x with log2(e) folded into the scale.
// Determinism: every sum has a fixed order, dq's by the turns; the counter decides which block does what, not what is done. Where
//       not `ordered`, the blocks between a tile's first and last add to dq as they come.
// Source: Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3), section 3 and its supplement's algorithm 3; Dao 2023,
//       arXiv:2307.08691, algorithm 2.
//
// Numbers of rows, tiles, stages and registers: not tuned.

#include "attention_hopper_backward.cuh"

// Keys by queries: the scores of keys that a query does not see become -inf. `key`: the lane's first row, and `query_first`, both
// from the block's first key on, as `begins` counts.
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

// A warpgroup: the products, of its 64 keys.
template <int HEAD_DIM>
void multiply(const Layout<HEAD_DIM>& at, const Part& part, const TensorMap& dqkv_map, unsigned char* memory, int heads,
              int kv_heads, float scale) {
    constexpr int TILE = QUERIES<HEAD_DIM>, PARTS = HEAD_DIM / 64, KEY_PART = KEYS * TILE_ROW_BYTES;
    constexpr int QUERY_PART = TILE * TILE_ROW_BYTES, OWN = GROUP_ROWS * TILE_ROW_BYTES;
    const int group = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % WARP;
    const float scale2 = scale * LOG2_E, *rows = reinterpret_cast<float*>(memory + (at.rows - at.keys));
    const unsigned char* begins = memory + (at.begins - at.keys);
    const unsigned long long own_keys = tile_descriptor(at.keys + group * OWN);
    const unsigned long long own_values = tile_descriptor(at.values + group * OWN);
    // Its share of dq: queries or features.
    const unsigned long long dq_keys = tile_descriptor(at.keys + (PARTS == 2) * group * KEY_PART);
    const unsigned long long dq_left = tile_descriptor(at.ds + (PARTS == 1) * group * KEY_PART);
    float s[TILE / 2] = {}, dp[TILE / 2] = {}, dq[32] = {}, dkey[PARTS][32] = {}, dvalue[PARTS][32] = {};
    unsigned left[TILE / 16][4];
    // Rows of the warpgroup's keys or values by those of a tile of queries.
    const auto multiply_rows = [&](float (&product)[TILE / 2], unsigned long long own, unsigned tile) {
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            multiply_tiles(product, advance(own, k / 4 * KEY_PART + k % 4 * 32),
                           advance(tile_descriptor(tile), k / 4 * QUERY_PART + k % 4 * 32), k > 0);
        commit_products();
    };
    // sum += left times a tile of queries.
    const auto add_weighted = [&](float (&sum)[PARTS][32], unsigned tile) {
#pragma unroll
        for (int k = 0; k < TILE / 16; k++)
#pragma unroll
            for (int i = 0; i < PARTS; i++)
                multiply_tile(sum[i], left[k], advance(tile_descriptor(tile), i * QUERY_PART + k * 16 * TILE_ROW_BYTES));
        commit_products();
    };

    wait(at.key_full[0], 0);
    wait(at.key_full[1], 0);
    wait(at.query_full[0], 0);
    fence_products();
    multiply_rows(s, own_keys, at.queries);
    wait_products<0>();
    hold(s);
    const int steps = (part.heads_end - part.head) * part.tiles;
    for (int step = 0; step < steps; step++) {
        const int stage = step % STAGES;
        const unsigned queries = at.queries + stage * at.QUERY_BYTES, douts = at.douts + stage * at.QUERY_BYTES;
        const float* row_lse = rows + stage * 2 * TILE + lane % 4 * 2;
        wait(at.dout_full[stage], step / STAGES % 2);
        fence_products();
        multiply_rows(dp, own_values, douts);
        const int query = (part.tile + step % part.tiles) * TILE - part.first;
        const unsigned char* begin = begins + stage * TILE;
        if (query < group * GROUP_ROWS + GROUP_ROWS - 1 || begin[TILE - 1] > group * GROUP_ROWS)
            hide_unseen<TILE>(s, group * GROUP_ROWS + thread / WARP * 16 + lane / 4, query, begin);
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
#pragma unroll
            for (int i = 8 * k; i < 8 * k + 8; i += 4) {
                const float2 lse = *reinterpret_cast<const float2*>(row_lse + i * 2);
#pragma unroll
                for (int e = i; e < i + 4; e++) s[e] = exp2_approx(s[e] * scale2 - (e % 2 ? lse.y : lse.x));
            }
            round_fragment(left[k], s, k);
        }
        fence_products();
        add_weighted(dvalue, douts);
        wait_products<1>();
        hold(dp);
#pragma unroll
        for (int i = 0; i < TILE / 2; i += 4) {
            const float2 delta = *reinterpret_cast<const float2*>(row_lse + TILE + i * 2);
#pragma unroll
            for (int e = i; e < i + 4; e += 2) {
                const unsigned p = left[e / 8][e / 2 % 4];  // rounded: there is no room for both
                dp[e] = __uint_as_float(p << 16) * (dp[e] - delta.x);
                dp[e + 1] = __uint_as_float(p & 0xffff0000) * (dp[e + 1] - delta.y);
            }
        }
        // The other warpgroup has multiplied the ds of two steps ago: it has been past the last step's sync_threads.
        const int ds = step % 2 * at.DS_BYTES;
        wait_products<0>();
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            round_fragment(left[k], dp, k);
            store_fragment(at.ds + ds + k / 4 * KEY_PART + group * OWN, k % 4, left[k]);
        }
        fence_async();
        fence_products();
        add_weighted(dkey, queries);
        sync_threads(1, ALL_GROUPS);  // all of ds is there
        fence_products();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            multiply_tiles<true, true>(dq, advance(dq_left, ds + k * 16 * TILE_ROW_BYTES),
                                       advance(dq_keys, k * 16 * TILE_ROW_BYTES), k > 0);
        commit_products();
        wait_products<1>();
        if (lane == 0) arrive(at.empty[stage]);
        const int following = min(step + 1, steps - 1);  // the last step's again, for nothing: a branch here would serialise
        wait(at.query_full[following % STAGES], following / STAGES % 2);
        fence_products();
        multiply_rows(s, own_keys, at.queries + following % STAGES * at.QUERY_BYTES);
        wait(at.dq_empty[group], step % 2 ^ 1);
        wait_products<1>();
        hold(dq);
        float4* own_dq = reinterpret_cast<float4*>(memory + (at.dq - at.keys) + group * at.DQ_BYTES) + thread;
#pragma unroll
        for (int i = 0; i < 8; i++) own_dq[i * WARPGROUP] = float4{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
        fence_async();
        __syncwarp();  // the warp's share is written
        if (lane == 0) arrive(at.dq_full[group]);
        wait_products<0>();
        hold(s);
    }
    wait_products<0>();
    sync_threads(1, ALL_GROUPS);  // nobody reads keys any more: their places take the results
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        hold(dkey[i]);
        hold(dvalue[i]);
#pragma unroll
        for (int e = 0; e < 32; e++) dkey[i][e] *= scale;
        store_sum(at.keys + (group * PARTS + i) * OWN, dkey[i]);
        store_sum(at.values + (group * PARTS + i) * OWN, dvalue[i]);
    }
    fence_async();
    sync_threads(2 + group, WARPGROUP);  // the results, written above by all, are copied by one
    if (thread == 0) {
        const int own_first = part.first + group * GROUP_ROWS;
        store_rows<HEAD_DIM>(dqkv_map, at.keys + group * PARTS * OWN, heads + part.shared, own_first, part.b);
        store_rows<HEAD_DIM>(dqkv_map, at.values + group * PARTS * OWN, heads + kv_heads + part.shared, own_first, part.b);
        wait_stores();  // they read this block's memory
    }
    wait(at.dq_empty[group], steps % 2 ^ 1);  // the last
}

// Grid: a block for each key tile, KV and B. turns and started are zero.
template <int HEAD_DIM>
__global__ void __launch_bounds__((GROUPS + 1) * WARPGROUP, 1)
    attention_backward(const __grid_constant__ TensorMap dqkv_map, const __grid_constant__ TensorMap dout_map,
                       const __grid_constant__ TensorMap qkv_map, bf16* dqkv, float* dq_sum, int* turns, int* started,
                       const float* delta, const float* lse, const int* start, int length, int heads, int kv_heads,
                       bool ordered, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Layout<HEAD_DIM> at(memory);
    int* const number = reinterpret_cast<int*>(memory + (at.number - at.keys));
    if (threadIdx.x == 0) *number = atomicAdd(started, 1);
    __syncthreads();  // the number, written above, is read by all
    Part part(*number, length, heads / kv_heads, kv_heads);
    if (threadIdx.x == ALL_GROUPS) {
        at.init();
        copy_keys(at, part, qkv_map, heads, kv_heads);
    }
    part.find_tiles<QUERIES<HEAD_DIM>>(start, length);
    __syncthreads();  // the barriers are ready
    if (threadIdx.x < ALL_GROUPS) {
        take_registers<224>();
        multiply(at, part, dqkv_map, memory, heads, kv_heads, scale);
    } else {
        give_registers<56>();
        const int warp = (threadIdx.x - ALL_GROUPS) / WARP;
        if (warp == 0)
            copy_queries(at, part, dout_map, qkv_map, reinterpret_cast<float*>(memory + (at.rows - at.keys)),
                         memory + (at.begins - at.keys), delta, lse, start, length, heads);
        else if (warp <= GROUPS)
            pass_dq(at, part, warp - 1, memory, dqkv, dq_sum, turns, start, length, heads, kv_heads, ordered,
                    scale);
    }
    __syncthreads();  // all end together
}
