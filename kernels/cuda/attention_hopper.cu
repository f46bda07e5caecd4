// Causal grouped-query attention for Hopper (sm_90a): wgmma products of tiles that the copy engine brings. bf16, head dims 64 and
// 128.
//
// The mathematics, the layout of the arrays and what is saved are attention_scalar.cu's:
//
//     s[t, j] = q[t] . k[j] / sqrt(D)  for start[b, t] <= j <= t        lse[t] = log sum_j exp(s[t, j])
//     out[t]  = sum_j exp(s[t, j] - lse[t]) v[j]
//
// Work: a block stays on its multiprocessor and takes item after item: QUERIES queries of one head. Warpgroups own 64 of them
//       each, with their sums in registers; a further one only decides on items and starts copies: queries of two items, keys
//       and values in tiles of KEYS rows, STAGES tiles ahead and on into the next item.
// Overlap: a warpgroup issues the scores of the next tile, be it the next item's, before the weighted values of this one, and
//       makes exponentials while both run. It waits for the values half way through them: the rest leaves room for rescaling and
//       rounding. (ptxas moves a wait for products up to the last branch before it: the wait for the tile's values, which had to
//       be somewhere, is that branch.) A warpgroup's turn at the tensor cores ends when its scores are there, so that one computes
//       exponentials while the other's products run: at D = 64 the exponentials take as long as the products.
// Order: items with most keys first, a section of heads after another whose keys and values together stay in the L2, to blocks as
//       they become free. Keys from the diagonal down, see attention_mma.cu.
// Skipped: tiles that no query of the item sees; only tiles on a border are masked element by element. Rows past the end of a
//       sequence are copied as zeros and not stored: tiles never reach into the next sequence.
// Precision: products of bf16 with fp32 sums; softmax and lse fp32; p is rounded to bf16 as a factor, out as it is stored. exp is
//       2^x with log2(e) / sqrt(D) folded into the scale.
// Determinism: every sum has a fixed order; the one atomic decides on who computes an item.
// Source: Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3), sections 3.1 and 3.2.
//
// Numbers of rows, tiles, stages and registers: not tuned.

#include "attention_hopper.cuh"

constexpr int QUERIES = GROUPS * GROUP_ROWS;
constexpr float LN_2 = 0.6931471805599453f;
constexpr int TURN = 2;        // the warpgroups take turns: 0 not at all, 1 at issuing products, 2 also until scores are there, 3 at 2^x
constexpr int FIRST = KEYS / 4;  // exponentials, of a thread's KEYS / 2, that are made before the weighted values are waited for
constexpr float GROWTH = 0;    // sums are rescaled when a largest score has grown by more than this, in powers of 2
constexpr int ORDER = 2;       // of items: 0 to and fro over the blocks, 1 round over them, 2 as blocks become free
constexpr bool NARROW = false;  // no exponentials of the half of a diagonal tile that nobody sees; FIRST must be 32
constexpr bool SPLIT = false;   // group 0, of two, has code of its own, that leaves that half out altogether; FIRST must be 32
constexpr bool LATE = false;    // weighted values are started when the next scores are there, not behind them
constexpr int MASK = 1;         // unseen keys are found 0 by two comparisons each, 1 in a word of bits
constexpr int BLOCKS = 1;      // a multiprocessor
constexpr int REGISTERS = GROUPS == 2 ? (BLOCKS == 2 ? 104 : 240) : GROUPS == 3 ? 160 : 112;
constexpr int POLYNOMIAL = 0;  // columns, of 8 fragments, whose 2^x is a polynomial

// What a block's warpgroups work on: a tile of queries of one head of one sequence, and the first tile of keys that it sees.
// first < 0: nothing is left.
struct Item {
    int first, head, b, lowest;
};

template <bool VALUE>
struct Constant {
    static constexpr bool value = VALUE;
};

// Item `item` of all.
inline Item item_at(int item, int tiles, int heads, int batch, int section, const int* start, int length) {
    const int begin = item / (section * tiles) * section, within = item - begin * tiles;
    const int size = min(section, batch * heads - begin), pair = begin + within % size;
    const int first = (tiles - 1 - within / size) * QUERIES, b = pair / heads;
    return {first, pair % heads, b, start[(long long)b * length + first] / KEYS};
}

// 2^x for -126 <= x < 127, and 2^-126 below, on the units that multiply and add: x = i + f, |f| <= 1/2; 2^f as a polynomial of
// degree 3 with relative error 7.5e-5 (bf16's rounding: 2e-3); i is added to the exponent.
inline float exp2_polynomial(float x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: a sum with it has no bits behind the point
    x = fmaxf(x, -126.0f);
    const float shifted = x + ROUND, f = x - (shifted - ROUND);
    const float y = ((0.0551716685f * f + 0.242611125f) * f + 0.693260968f) * f + 0.999928057f;
    return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}

// Take the largest scores of the tile's rows into account: `shift`, in powers of 2, is what is subtracted from all scores; `kept`
// is what sums so far are worth now. Returns whether any of the warp's has to be rescaled.
inline bool raise(const float (&s)[KEYS / 2], float (&shift)[2], float (&total)[2], float (&kept)[2], float scale2) {
    float raised[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
        for (int i = 2 * half + 4; i < KEYS / 2; i += 4) largest = fmaxf(largest, fmaxf(s[i], s[i + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));  // a row is spread over 4 lanes, and a warp is never
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));  // divided here
        raised[half] = fmaxf(shift[half], largest * scale2);
    }
    if (GROWTH > 0 && !__any_sync(ALL_LANES, (raised[0] > shift[0] + GROWTH) | (raised[1] > shift[1] + GROWTH))) return false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        kept[half] = exp2_approx(shift[half] - raised[half]);
        shift[half] = raised[half];
        total[half] *= kept[half];
    }
    return true;
}

// Scores BEGIN .. to their exponentials, and to the rows' totals.
template <int BEGIN, int END>
void exponentials(float (&s)[KEYS / 2], const float (&shift)[2], float (&total)[2], float scale2) {
#pragma unroll
    for (int i = BEGIN; i < END; i++) {
        const int half = i / 2 % 2;
        const float x = s[i] * scale2 - shift[half];
        s[i] = i / 4 % 8 < POLYNOMIAL ? exp2_polynomial(x) : exp2_approx(x);
        total[half] += s[i];
    }
}

// Queries by keys: the scores of keys that a query does not see become -inf. `query` is the lane's first row; begin: the starts
// of its two. The own key of every row is in the first tile, so the largest score is finite from then on.
inline void hide_unseen(float (&s)[KEYS / 2], int query, int key_first, const int (&begin)[2]) {
    const int lane_key = key_first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int lowest = begin[half] - lane_key, highest = query + 8 * half - lane_key;
        if (MASK == 0) {
#pragma unroll
            for (int i = 2 * half; i < KEYS / 2; i += 4)
#pragma unroll
                for (int odd = 0; odd < 2; odd++)
                    if ((i / 4 * 8 + odd < lowest) | (i / 4 * 8 + odd > highest)) s[i + odd] = minus_infinity();
        } else {
            // The lane's keys of a row, two of each 8, as bits.
            const auto before = [](int key) {  // those below lane_key + key
                const int bits = key / 8 * 2 + min(key % 8, 2);
                return key <= 0 ? 0u : bits >= KEYS / 4 ? ~0u : (1u << bits) - 1;
            };
            const unsigned seen = before(highest + 1) & ~before(lowest);
#pragma unroll
            for (int i = 2 * half; i < KEYS / 2; i += 4)
#pragma unroll
                for (int odd = 0; odd < 2; odd++)
                    if (!(seen >> (i / 4 * 2 + odd) & 1)) s[i + odd] = minus_infinity();
        }
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

// The item's results: sums by their totals, through the warpgroup's own tile, and lse. `barrier`: the warpgroup's own.
template <int HEAD_DIM>
void store_results(float (&sum)[HEAD_DIM / 64][32], const float (&shift)[2], float (&total)[2], const TensorMap& out_map,
                   unsigned own_out, int barrier, float* lse, const Item& item, int own_first, int query, int length, int heads) {
    if (threadIdx.x % WARPGROUP == 0) wait_stores_read();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(ALL_LANES, total[half], 1);  // the row's 4 lanes, as in raise
        total[half] += __shfl_xor_sync(ALL_LANES, total[half], 2);
        if (threadIdx.x % 4 == 0 && query + 8 * half < length)
            lse[((long long)item.b * heads + item.head) * length + query + 8 * half] = (shift[half] + __log2f(total[half])) * LN_2;
        total[half] = __fdividef(1.0f, total[half]);
    }
    sync_threads(barrier, WARPGROUP);  // the last item's results have left own_out
#pragma unroll
    for (int part = 0; part < HEAD_DIM / 64; part++) {
#pragma unroll
        for (int i = 0; i < 32; i++) sum[part][i] *= total[i / 2 % 2];
        store_sum(own_out + part * GROUP_ROWS * TILE_ROW_BYTES, sum[part]);
    }
    fence_async();
    sync_threads(barrier, WARPGROUP);  // the results, written above by all, are copied by one
    if (threadIdx.x % WARPGROUP == 0) store_rows<HEAD_DIM>(out_map, own_out, item.head, own_first, item.b);
}

// Grid: a block a multiprocessor. counts: items taken, and blocks done; zero between launches. `section`: heads, of all sequences', taken together. Shared memory: queries of two items, results
// of one, STAGES of keys, of values, the barriers, and two items.
template <int HEAD_DIM, int STAGES>
__global__ void __launch_bounds__((GROUPS + 1) * WARPGROUP, BLOCKS)
    attention_forward(const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap qkv_map, float* lse,
                      const int* start, int* counts, int batch, int length, int heads, int kv_heads, int section, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    constexpr int PARTS = HEAD_DIM / 64, OWN_BYTES = GROUP_ROWS * HEAD_DIM * 2, TILE_BYTES = KEYS * HEAD_DIM * 2;
    const unsigned queries = shared_address(memory), outs = queries + 2 * GROUPS * OWN_BYTES, keys = outs + GROUPS * OWN_BYTES;
    const unsigned values = keys + STAGES * TILE_BYTES;
    const Barriers query_full(values + STAGES * TILE_BYTES), query_empty(query_full.end(2));
    const Barriers key_full(query_empty.end(2)), key_empty(key_full.end(STAGES));
    const Barriers value_full(key_empty.end(STAGES)), value_empty(value_full.end(STAGES));
    Item* const items = (Item*)(memory + (value_empty.end(STAGES) - queries));
    if (threadIdx.x == 0) {
        query_full.init(2, GROUPS);
        query_empty.init(2, GROUPS * WARPGROUP / WARP);
        key_full.init(STAGES, 1);
        key_empty.init(STAGES, GROUPS * WARPGROUP / WARP);
        value_full.init(STAGES, 1);
        value_empty.init(STAGES, GROUPS * WARPGROUP / WARP);
        fence_barrier_init();
    }
    __syncthreads();  // the barriers are ready
    const int tiles = (length + QUERIES - 1) / QUERIES, count = tiles * heads * batch;
    const int group = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARP;
    unsigned step = 0, round = 0;  // tiles of keys, and items, so far; a group's `step` is the tile whose scores are next

    if (group == GROUPS) {
        give_registers<24>();
        if (threadIdx.x != GROUPS * WARPGROUP) return;
        for (;; round++) {
            const unsigned slot = round % 2; const int number = ORDER == 2   ? atomicAdd(&counts[0], 1)
                                                 : ORDER == 1 ? round * gridDim.x + blockIdx.x
                                                 : round % 2  ? (round + 1) * gridDim.x - 1 - blockIdx.x
                                                              : round * gridDim.x + blockIdx.x;
            const Item item = number < count ? item_at(number, tiles, heads, batch, section, start, length) : Item{-1, 0, 0, 0};
            wait(query_empty[slot], round / 2 % 2 ^ 1);
            items[slot] = item;
            if (item.first < 0) {
                for (int g = 0; g < GROUPS; g++) arrive(query_full[slot]);
                if (ORDER == 2 && atomicAdd(&counts[1], 1) == gridDim.x - 1) counts[0] = counts[1] = 0;  // all have seen the end
                return;
            }
            for (int g = 0; g < GROUPS; g++)
                load_rows<HEAD_DIM, GROUP_ROWS>(queries + (slot * GROUPS + g) * OWN_BYTES, qkv_map, query_full[slot], item.head,
                                                item.first + g * GROUP_ROWS, item.b);
            const int key_head = heads + item.head / (heads / kv_heads);
            for (int tile = (min(item.first + QUERIES, length) - 1) / KEYS; tile >= item.lowest; tile--, step++) {
                const unsigned stage = step % STAGES, parity = step / STAGES % 2;
                wait(key_empty[stage], parity ^ 1);
                load_rows<HEAD_DIM, KEYS>(keys + stage * TILE_BYTES, qkv_map, key_full[stage], key_head, tile * KEYS, item.b);
                wait(value_empty[stage], parity ^ 1);
                load_rows<HEAD_DIM, KEYS>(values + stage * TILE_BYTES, qkv_map, value_full[stage], key_head + kv_heads,
                                          tile * KEYS, item.b);
            }
        }
    }

    take_registers<REGISTERS>();
    const unsigned own_out = outs + group * OWN_BYTES;
    const float scale2 = scale * LOG2_E;
    const int my_turn = 1 + group, other_turn = 1 + (group + 1) % GROUPS, together = 1 + GROUPS + group;
    if (TURN && group == GROUPS - 1) arrive_threads(other_turn, 2 * WARPGROUP);  // the first turn is group 0's
    const auto take_turn = [&](bool which) {
        if (which) sync_threads(my_turn, 2 * WARPGROUP);
    };
    const auto end_turn = [&](bool which) {
        if (which) arrive_threads(other_turn, 2 * WARPGROUP);
    };
    const auto consume = [&](auto half) {
    constexpr bool HALF = half.value;
    float s[KEYS / 2] = {}, shift[2], total[2], kept[2], sum[PARTS][32] = {};
    unsigned p[KEYS / 16][4];
    const unsigned long long all_keys = tile_descriptor(keys), all_values = tile_descriptor(values);
    unsigned long long own;
    Item item;
    int own_first, query, begin[2], latest_begin, tile;
    unsigned before;  // the tile, of all so far, of which p is
    const auto take_item = [&] {
        wait(query_full[round % 2], round / 2 % 2);
        const Item next = items[round % 2];
        if (next.first < 0) return false;
        item = next;
        own_first = item.first + group * GROUP_ROWS;
        own = tile_descriptor(queries + (round % 2 * GROUPS + group) * OWN_BYTES);
        query = own_first + threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
        const int* starts = start + (long long)item.b * length;
        begin[0] = starts[min(query, length - 1)];
        begin[1] = starts[min(query + 8, length - 1)];
        latest_begin = starts[min(own_first + GROUP_ROWS, length) - 1];
        tile = (min(item.first + QUERIES, length) - 1) / KEYS;
        if (GROUPS > 2 || KEYS < 128) {
            for (; tile * KEYS >= own_first + GROUP_ROWS; tile--, step++) {  // seen by later groups only
                take_turn(TURN > 0);
                end_turn(TURN > 0);
                wait(key_full[step % STAGES], step / STAGES % 2);
                wait(value_full[step % STAGES], step / STAGES % 2);
                if (lane == 0) arrive(key_empty[step % STAGES]);
                if (lane == 0) arrive(value_empty[step % STAGES]);
            }
        }
        return true;
    };
    // Whether the warpgroup sees the first 64 keys only, of an item's first tile.
    const auto narrow = [&] { return tile * KEYS + GROUP_ROWS > own_first + GROUP_ROWS - 1; };
    // Start to compute the scores of the tile of keys that came `step`-th.
    const auto multiply_keys = [&](bool first) {
        const unsigned long long other = advance(all_keys, step % STAGES * TILE_BYTES);
        if (HALF && first) {
            float(&lower)[32] = reinterpret_cast<float(&)[32]>(s);
#pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; k++)
                multiply_tiles(lower, advance(own, k / 4 * GROUP_ROWS * TILE_ROW_BYTES + k % 4 * 32),
                               advance(other, k / 4 * KEYS * TILE_ROW_BYTES + k % 4 * 32), k > 0);
            commit_products();
            return;
        }
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            multiply_tiles(s, advance(own, k / 4 * GROUP_ROWS * TILE_ROW_BYTES + k % 4 * 32),
                           advance(other, k / 4 * KEYS * TILE_ROW_BYTES + k % 4 * 32), k > 0);
        commit_products();
    };
    // The scores are there: what has to be rescaled, and the first exponentials.
    const auto weigh = [&](bool first, bool late) {
        hold(s);
        if (!LATE || !late) end_turn(TURN == 2);
        if (lane == 0) arrive(key_empty[step % STAGES]);
        if (tile * KEYS + KEYS - 1 > own_first || tile * KEYS < latest_begin) hide_unseen(s, query, tile * KEYS, begin);
        if (HALF && first)
#pragma unroll
            for (int i = 32; i < KEYS / 2; i++) s[i] = minus_infinity();
        const bool grown = raise(s, shift, total, kept, scale2);
        take_turn(TURN == 3);
        exponentials<0, FIRST>(s, shift, total, scale2);
        wait(value_full[step % STAGES], step / STAGES % 2);
        if (FIRST == KEYS / 2) end_turn(TURN == 3);
        return grown;
    };
    const auto weigh_rest = [&](bool first) {
        if ((NARROW && first && narrow()) || (HALF && first))
#pragma unroll
            for (int i = 32; i < KEYS / 2; i++) s[i] = 0;
        else
            exponentials<FIRST, KEYS / 2>(s, shift, total, scale2);
        if (FIRST < KEYS / 2) end_turn(TURN == 3);
    };
    const auto forget = [&] {
        shift[0] = shift[1] = minus_infinity();
        total[0] = total[1] = 0;
    };
    const auto products_are_there = [&] {
        wait_products<0>();
#pragma unroll
        for (int part = 0; part < PARTS; part++) hold(sum[part]);
        if (lane == 0) arrive(value_empty[before % STAGES]);
    };

    const auto start_late = [&] {
        if (!LATE) return;
        hold(s);
        end_turn(TURN == 2);
        fence_products();
        add_weighted<HEAD_DIM>(sum, p, advance(all_values, before % STAGES * TILE_BYTES));
    };
    const auto start_products = [&](bool first, bool values_too) {
        wait(key_full[step % STAGES], step / STAGES % 2);
        take_turn(TURN == 1 || TURN == 2);
        fence_products();
        multiply_keys(first);
        if (values_too) add_weighted<HEAD_DIM>(sum, p, advance(all_values, before % STAGES * TILE_BYTES));
        end_turn(TURN == 1);
    };

    if (take_item()) {
        start_products(true, false);
        wait_products<0>();
        forget();
        weigh(true, false);
        weigh_rest(true);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) round_fragment(p[k], s, k);
        for (;;) {
            before = step++;
            for (tile--; tile >= item.lowest; tile--) {
                start_products(false, !LATE);
                wait_products<LATE ? 0 : 1>();
                start_late();
                const bool grown = weigh(false, true);
                products_are_there();
                weigh_rest(false);
                if (GROWTH == 0 || grown)
#pragma unroll
                    for (int part = 0; part < PARTS; part++)
#pragma unroll
                        for (int i = 0; i < 32; i++) sum[part][i] *= kept[i / 2 % 2];
#pragma unroll
                for (int k = 0; k < KEYS / 16; k++) round_fragment(p[k], s, k);
                before = step++;
            }
            if (lane == 0) arrive(query_empty[round % 2]);
            round++;
            const Item done = item;
            const int done_first = own_first, done_query = query;
            if (!take_item()) break;
            start_products(true, !LATE);
            wait_products<LATE ? 0 : 1>();
                start_late();
            const float done_shift[2] = {shift[0], shift[1]};
            float done_total[2] = {total[0], total[1]};
            forget();
            weigh(true, true);
            products_are_there();
            weigh_rest(true);
            store_results<HEAD_DIM>(sum, done_shift, done_total, out_map, own_out, together, lse, done, done_first, done_query,
                                    length, heads);
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int i = 0; i < 32; i++) sum[part][i] = 0;
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) round_fragment(p[k], s, k);
        }
        fence_products();
        add_weighted<HEAD_DIM>(sum, p, advance(all_values, before % STAGES * TILE_BYTES));
        products_are_there();
        store_results<HEAD_DIM>(sum, shift, total, out_map, own_out, together, lse, item, own_first, query, length, heads);
    }
    };
    if (SPLIT && HEAD_DIM == 64 && group == 0)
        consume(Constant<true>());
    else
        consume(Constant<false>());
    if (TURN && group == 0) sync_threads(my_turn, 2 * WARPGROUP);  // the last group's last arrival
    if (threadIdx.x % WARPGROUP == 0) wait_stores();                    // they read this block's memory
}
