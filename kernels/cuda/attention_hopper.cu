// Causal grouped-query attention for Hopper (sm_90a): wgmma products of tiles that the copy engine brings. bf16, head dims 64 and
// 128.
//
// The mathematics, the layout of the arrays and what is saved are attention_scalar.cu's:
//
//     s[t, j] = q[t] . k[j] / sqrt(D)  for start[b, t] <= j <= t        lse[t] = log sum_j exp(s[t, j])
//     out[t]  = sum_j exp(s[t, j] - lse[t]) v[j]
//
// Work: a block stays on its multiprocessor and takes item after item: QUERIES queries of one head. Two warpgroups own 64 of
//       them each, with their sums in registers; a third only starts copies: queries once an item, keys and values in tiles
//       of KEYS rows, STAGES tiles ahead and on into the next item. So neither an item's first copies nor its stores leave
//       the tensor cores idle.
// Overlap: a warpgroup issues the scores of the next tile before it waits for the weighted values of this one, and makes
//       probabilities while both run. The two warpgroups take turns at issuing, so that one computes exponentials while the
//       other's products run: at D = 64 the exponentials take as long as the products.
// Order: items with most keys first, a section of heads after another whose keys and values together stay in the L2; every
//       other round in reverse, so that each block gets long and short ones. Keys from the diagonal down, see attention_mma.cu.
// Skipped: tiles that no query of the item sees; only tiles on a border are masked element by element. Rows past the end of a
//       sequence are copied as zeros and not stored: tiles never reach into the next sequence.
// Precision: products of bf16 with fp32 sums; softmax and lse fp32; p is rounded to bf16 as a factor, out as it is stored. exp is
//       2^x with log2(e) / sqrt(D) folded into the scale.
// Determinism: every sum has a fixed order; no atomics.
// Source: Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3), sections 3.1 and 3.2.
//
// Numbers of rows, tiles, stages and registers: not tuned.

#include "attention_hopper.cuh"

constexpr int QUERIES = GROUPS * GROUP_ROWS;

// Item `item` of all: its tile of queries, its head and its sequence.
struct Item {
    int first, head, b;

    Item(int item, int tiles, int heads, int batch, int section) {
        const int begin = item / (section * tiles) * section, within = item - begin * tiles;
        const int size = min(section, batch * heads - begin), pair = begin + within % size;
        first = (tiles - 1 - within / size) * QUERIES;
        head = pair % heads;
        b = pair / heads;
    }
};

// Scores to exp(score - largest) of their rows; `kept` is what sums so far are worth now.
inline void exponentials(float (&s)[KEYS / 2], float (&largest)[2], float (&total)[2], float (&kept)[2], float scale2) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float raised = largest[half];
#pragma unroll
        for (int i = 2 * half; i < KEYS / 2; i += 4) raised = fmaxf(raised, fmaxf(s[i], s[i + 1]));
        raised = fmaxf(raised, __shfl_xor_sync(ALL_LANES, raised, 1));  // a row is spread over 4 lanes, and a warp is never
        raised = fmaxf(raised, __shfl_xor_sync(ALL_LANES, raised, 2));  // divided here
        const float shift = raised * scale2;
        kept[half] = exp2_approx(largest[half] * scale2 - shift);
        largest[half] = raised;
        total[half] *= kept[half];
#pragma unroll
        for (int i = 2 * half; i < KEYS / 2; i += 4)
#pragma unroll
            for (int e = i; e < i + 2; e++) {
                s[e] = exp2_approx(s[e] * scale2 - shift);
                total[half] += s[e];
            }
    }
}

// Queries by keys: the scores of keys that a query does not see become -inf. `query` is the lane's first row; begin: the starts
// of its two. The own key of every row is in the first tile, so the largest score is finite from then on.
inline void hide_unseen(float (&s)[KEYS / 2], int query, int key_first, const int (&begin)[2]) {
    const int lane_key = key_first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int lowest = begin[half] - lane_key, highest = query + 8 * half - lane_key;
#pragma unroll
        for (int i = 2 * half; i < KEYS / 2; i += 4)
#pragma unroll
            for (int odd = 0; odd < 2; odd++)
                if ((i / 4 * 8 + odd < lowest) | (i / 4 * 8 + odd > highest)) s[i + odd] = minus_infinity();
    }
}

// sum += p values: `values` is the tile's descriptor.
template <int HEAD_DIM>
void add_weighted(float (&sum)[HEAD_DIM / 64][32], const unsigned (&p)[KEYS / 16][4], unsigned long long values) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int part = 0; part < HEAD_DIM / 64; part++)
            multiply_tile(sum[part], p[k], advance(values, part * KEYS * TILE_ROW_BYTES + k * 16 * TILE_ROW_BYTES));
    commit_products();
}

// Grid: a block a multiprocessor. `section`: heads, of all sequences', taken together. Shared memory: the queries, their results,
// STAGES of keys, of values, and the barriers.
template <int HEAD_DIM, int STAGES>
__global__ void __launch_bounds__((GROUPS + 1) * WARPGROUP, 1)
    attention_forward(const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap qkv_map, float* lse,
                      const int* start, int batch, int length, int heads, int kv_heads, int section, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    constexpr int PARTS = HEAD_DIM / 64, OWN_BYTES = GROUP_ROWS * HEAD_DIM * 2, TILE_BYTES = KEYS * HEAD_DIM * 2;
    const unsigned queries = shared_address(memory), outs = queries + GROUPS * OWN_BYTES, keys = outs + GROUPS * OWN_BYTES;
    const unsigned values = keys + STAGES * TILE_BYTES;
    const Barriers query_full(values + STAGES * TILE_BYTES), query_empty(query_full.end(GROUPS));
    const Barriers key_full(query_empty.end(GROUPS)), key_empty(key_full.end(STAGES));
    const Barriers value_full(key_empty.end(STAGES)), value_empty(value_full.end(STAGES));
    if (threadIdx.x == 0) {
        query_full.init(GROUPS, 1);
        query_empty.init(GROUPS, WARPGROUP / WARP);
        key_full.init(STAGES, 1);
        key_empty.init(STAGES, GROUPS * WARPGROUP / WARP);
        value_full.init(STAGES, 1);
        value_empty.init(STAGES, GROUPS * WARPGROUP / WARP);
        fence_barrier_init();
    }
    __syncthreads();  // the barriers are ready
    const int tiles = (length + QUERIES - 1) / QUERIES, items = tiles * heads * batch;
    const int group = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARP;
    const auto item_of = [&](int round) {
        return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    };
    int step = 0;  // tiles of keys so far

    if (group == GROUPS) {
        give_registers<24>();
        if (threadIdx.x != GROUPS * WARPGROUP) return;
        for (int round = 0, number; (number = item_of(round)) < items; round++) {
            const Item item(number, tiles, heads, batch, section);
            const int lowest = start[(long long)item.b * length + item.first] / KEYS;
            const int key_head = heads + item.head / (heads / kv_heads);
            for (int g = 0; g < GROUPS; g++) {
                wait(query_empty[g], round % 2 ^ 1);
                load_rows<HEAD_DIM, GROUP_ROWS>(queries + g * OWN_BYTES, qkv_map, query_full[g], item.head,
                                                item.first + g * GROUP_ROWS, item.b);
            }
            for (int tile = item.first / KEYS; tile >= lowest; tile--, step++) {
                const int stage = step % STAGES, parity = step / STAGES % 2;
                wait(key_empty[stage], parity ^ 1);
                load_rows<HEAD_DIM, KEYS>(keys + stage * TILE_BYTES, qkv_map, key_full[stage], key_head, tile * KEYS, item.b);
                wait(value_empty[stage], parity ^ 1);
                load_rows<HEAD_DIM, KEYS>(values + stage * TILE_BYTES, qkv_map, value_full[stage], key_head + kv_heads,
                                          tile * KEYS, item.b);
            }
        }
        return;
    }

    take_registers<240>();
    const unsigned own_out = outs + group * OWN_BYTES;
    const unsigned long long own_queries = tile_descriptor(queries + group * OWN_BYTES);
    const float scale2 = scale * LOG2_E;
    float s[KEYS / 2] = {};
    // All that the warpgroup does at the tensor cores between two hardware barriers is its turn.
    const int my_turn = 1 + group, other_turn = 2 - group, together = 3 + group;
    if (group == 1) arrive_threads(other_turn, GROUPS * WARPGROUP);  // the first turn is group 0's
    const auto multiply_keys = [&](int stage) {
        const unsigned long long tile = tile_descriptor(keys + stage * TILE_BYTES);
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            multiply_tiles(s, advance(own_queries, k / 4 * GROUP_ROWS * TILE_ROW_BYTES + k % 4 * 32),
                           advance(tile, k / 4 * KEYS * TILE_ROW_BYTES + k % 4 * 32), k > 0);
        commit_products();
    };
    for (int round = 0, number; (number = item_of(round)) < items; round++) {
        const Item item(number, tiles, heads, batch, section);
        const long long row = (long long)item.b * length;
        const int own_first = item.first + group * GROUP_ROWS, query = own_first + threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
        const int begin[2] = {start[row + min(query, length - 1)], start[row + min(query + 8, length - 1)]};
        const int latest_begin = start[row + min(own_first + GROUP_ROWS, length) - 1];
        const int lowest = start[row + item.first] / KEYS;
        float largest[2] = {minus_infinity(), minus_infinity()}, total[2] = {}, kept[2], sum[PARTS][32] = {};
        unsigned p[KEYS / 16][4];

        wait(query_full[group], round % 2);
        wait(key_full[step % STAGES], step / STAGES % 2);
        sync_threads(my_turn, GROUPS * WARPGROUP);  // the other group has issued its products
        fence_products();
        multiply_keys(step % STAGES);
        arrive_threads(other_turn, GROUPS * WARPGROUP);
        wait_products<0>();
        hold(s);
        int tile = item.first / KEYS;
        const auto weigh = [&] {
            if (lane == 0) arrive(key_empty[step % STAGES]);
            if (tile * KEYS + KEYS - 1 > own_first || tile * KEYS < latest_begin) hide_unseen(s, query, tile * KEYS, begin);
            exponentials(s, largest, total, kept, scale2);
        };
        weigh();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) round_fragment(p[k], s, k);
        for (tile--; tile >= lowest; tile--) {
            const int stage = step % STAGES, parity = step / STAGES % 2;
            step++;
            wait(key_full[step % STAGES], step / STAGES % 2);
            sync_threads(my_turn, GROUPS * WARPGROUP);  // as above
            fence_products();
            multiply_keys(step % STAGES);
            wait(value_full[stage], parity);
            add_weighted<HEAD_DIM>(sum, p, tile_descriptor(values + stage * TILE_BYTES));
            arrive_threads(other_turn, GROUPS * WARPGROUP);
            wait_products<1>();
            hold(s);
            weigh();
            wait_products<0>();
#pragma unroll
            for (int part = 0; part < PARTS; part++) hold(sum[part]);
            if (lane == 0) arrive(value_empty[stage]);
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int i = 0; i < 32; i++) sum[part][i] *= kept[i / 2 % 2];
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) round_fragment(p[k], s, k);
        }
        if (lane == 0) arrive(query_empty[group]);
        wait(value_full[step % STAGES], step / STAGES % 2);
        fence_products();
        add_weighted<HEAD_DIM>(sum, p, tile_descriptor(values + step % STAGES * TILE_BYTES));
        if (threadIdx.x % WARPGROUP == 0) wait_stores_read();
        sync_threads(together, WARPGROUP);  // the last item's results have left own_out
        wait_products<0>();
#pragma unroll
        for (int part = 0; part < PARTS; part++) hold(sum[part]);
        if (lane == 0) arrive(value_empty[step % STAGES]);
        step++;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            total[half] += __shfl_xor_sync(ALL_LANES, total[half], 1);  // the row's 4 lanes, as in exponentials
            total[half] += __shfl_xor_sync(ALL_LANES, total[half], 2);
            if (lane % 4 == 0 && query + 8 * half < length)
                lse[((long long)item.b * heads + item.head) * length + query + 8 * half] =
                    largest[half] * scale + logf(total[half]);
            total[half] = 1.0f / total[half];
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
#pragma unroll
            for (int i = 0; i < 32; i++) sum[part][i] *= total[i / 2 % 2];
            store_sum(own_out + part * GROUP_ROWS * TILE_ROW_BYTES, sum[part]);
        }
        fence_async();
        sync_threads(together, WARPGROUP);  // the results, written above by all, are copied by one
        if (threadIdx.x % WARPGROUP == 0) store_rows<HEAD_DIM>(out_map, own_out, item.head, own_first, item.b);
    }
    if (group == 0) sync_threads(my_turn, GROUPS * WARPGROUP);  // group 1's last arrival
    if (threadIdx.x % WARPGROUP == 0) wait_stores();            // they read this block's memory
}
