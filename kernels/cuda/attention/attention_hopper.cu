// Causal grouped-query attention for Hopper (sm_90a): wgmma products of tiles that the copy engine brings. bf16, head dims 64
// and 128.
//
// The mathematics, the layout of the arrays and what is saved are attention_scalar.cu's:
//
//     s[t, j] = q[t] . k[j] / sqrt(D)  for start[b, t] <= j <= t        lse[t] = log sum_j exp(s[t, j])
//     out[t]  = sum_j exp(s[t, j] - lse[t]) v[j]
//
// Work: a block stays on its multiprocessor and takes item after item: QUERIES queries of one head. Two warpgroups own 64 of
//       them each, with their sums in registers. One thread of a third takes items and starts copies: queries of two items,
//       keys and values in tiles of KEYS rows, STAGES tiles ahead and on into the next item.
// Overlap: a warpgroup issues the scores of the next tile, be it the next item's, before the weighted values of this one, and
//       makes exponentials while those run. So neither an item's first copies nor its results leave the tensor cores idle.
// Turns: at D = 64 the exponentials of a tile take as long as its products, by units that can work at once. So the warpgroups
//       take turns at their exponentials: one's run beside the other's products, which it issues when its turn is over, and
//       exponentials and products of the two interleave. Products need no turns, they queue. What is neither, largest scores,
//       rescaling and rounding, is outside of the turn, beside the other's exponentials.
// Waiting: ptxas moves a wait for products up to the last branch before it. The wait for the tile's values, which has to be
//       somewhere, is that branch: most exponentials are made while the weighted values run, the rest when they are there.
// Order: items with most keys first, a section of heads after another whose keys and values together stay in the L2, to blocks
//       as they become free, so that they end together. Keys from the diagonal down, see attention_mma.cu.
// Skipped: tiles that no query of the item sees; only tiles on a border are masked element by element. Rows past the end of a
//       sequence are copied as zeros and not stored: tiles never reach into the next sequence.
// Precision: products of bf16 with fp32 sums; softmax and lse fp32; p is rounded to bf16 as a factor, out as it is stored. exp
//       is 2^x with log2(e) / sqrt(D) folded into the scale.
// Determinism: every sum has a fixed order; the atomics decide which block does what, not what is done.
// Source: Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3), sections 3.1 and 3.2.
//
// What else was timed: kernels/NOTES.md, 2026-11-30. Numbers of rows and registers: not tuned.

#include "attention_hopper_forward.cuh"

constexpr int EARLY = KEYS / 2 * 3 / 4;  // exponentials, of a thread's KEYS / 2 of a tile, before the wait: NOTES.md, as above
constexpr int TURNS = 1, OWN = TURNS + GROUPS;  // hardware barriers, each warpgroup's
constexpr float LN_2 = 0.6931471805599453f;
static_assert(GROUPS == 2, "two take turns");

// Queries by keys: the scores of keys that a query does not see become -inf. `query` is the lane's first row; begin: the starts
// of its two. The own key of every row is in the first tile, so the largest score is finite from then on.
inline void hide_unseen(float (&s)[KEYS / 2], int query, int key_first, const int (&begin)[2]) {
    const int lane_key = key_first + threadIdx.x % 4 * 2;
    // The lane's keys of a row, two of each 8, as bits: fewer instructions than two comparisons each. Here those below
    // lane_key + key.
    const auto before = [](int key) {
        const int bits = key / 8 * 2 + min(key % 8, 2);
        return key <= 0 ? 0u : bits >= KEYS / 4 ? ~0u : (1u << bits) - 1;
    };
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int lowest = begin[half] - lane_key, highest = query + 8 * half - lane_key;
        const unsigned seen = before(highest + 1) & ~before(lowest);
#pragma unroll
        for (int i = 2 * half; i < KEYS / 2; i += 4)
#pragma unroll
            for (int odd = 0; odd < 2; odd++)
                if (!(seen >> (i / 4 * 2 + odd) & 1)) s[i + odd] = minus_infinity();
    }
}

// Take the largest scores of the tile's rows into account: `shift`, in powers of 2, is what is subtracted from all scores;
// `kept` is what sums so far are worth now.
inline void raise(const float (&s)[KEYS / 2], float (&shift)[2], float (&total)[2], float (&kept)[2], float scale2) {
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
#pragma unroll
    for (int half = 0; half < 2; half++) {
        kept[half] = exp2_approx(shift[half] - raised[half]);
        shift[half] = raised[half];
        total[half] *= kept[half];
    }
}

// Scores BEGIN .. END - 1 to their exponentials, and to the rows' totals.
template <int BEGIN, int END>
void exponentials(float (&s)[KEYS / 2], const float (&shift)[2], float (&total)[2], float scale2) {
#pragma unroll
    for (int i = BEGIN; i < END; i++) {
        s[i] = exp2_approx(s[i] * scale2 - shift[i / 2 % 2]);
        total[i / 2 % 2] += s[i];
    }
}

// Start s = queries times keys, or sum += p values; the tiles are descriptors.
template <int HEAD_DIM>
void multiply_keys(float (&s)[KEYS / 2], unsigned long long queries, unsigned long long keys) {
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++)
        wgmma_ss(s, advance(queries, k / 4 * GROUP_ROWS * TILE_ROW_BYTES + k % 4 * 32),
                       advance(keys, k / 4 * KEYS * TILE_ROW_BYTES + k % 4 * 32), k > 0);
    wgmma_commit();
}

template <int PARTS>
void add_weighted(float (&sum)[PARTS][32], const unsigned (&p)[KEYS / 16][4], unsigned long long values) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            wgmma_rs(sum[i], p[k], advance(values, i * KEYS * TILE_ROW_BYTES + k * 16 * TILE_ROW_BYTES));
    wgmma_commit();
}

inline void round_weights(unsigned (&p)[KEYS / 16][4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) round_fragment(p[k], s, k);
}

template <int PARTS>
void clear(float (&sum)[PARTS][32]) {
#pragma unroll
    for (int i = 0; i < PARTS; i++)
#pragma unroll
        for (int e = 0; e < 32; e++) sum[i][e] = 0;
}

template <int PARTS>
void scale_rows(float (&sum)[PARTS][32], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < PARTS; i++)
#pragma unroll
        for (int e = 0; e < 32; e++) sum[i][e] *= factor[e / 2 % 2];
}

// What a thread keeps of its warpgroup's part of an item: rows first .., of which `query` and the eighth after it are its own.
struct Part {
    Item item;
    int first, query;
    int begin[2], latest_begin;  // starts of its rows, and of the warpgroup's last
    int tile;                    // of keys: that whose scores are next
    unsigned long long queries;  // the tile's descriptor
    float shift[2], total[2];    // of its rows, see raise; totals of its own columns

    void take(const Item& item, int group, unsigned long long queries, const int* start, int length) {
        this->item = item;
        this->queries = queries;
        first = item.first + group * GROUP_ROWS;
        query = first + threadIdx.x % WARPGROUP / WARP * 16 + threadIdx.x % WARP / 4;
        const int* starts = start + (long long)item.b * length;
        begin[0] = starts[min(query, length - 1)];
        begin[1] = starts[min(query + 8, length - 1)];
        latest_begin = starts[min(first + GROUP_ROWS, length) - 1];
        tile = item.highest(length);
        shift[0] = shift[1] = minus_infinity();
        total[0] = total[1] = 0;
    }

    // Whether some row does not see some key of the tile.
    bool on_border() const { return tile * KEYS + KEYS - 1 > first || tile * KEYS < latest_begin; }
};

// A warpgroup's results of an item: sums by their totals, through its own tile, and lse.
template <int PARTS>
void store_results(float (&sum)[PARTS][32], const Part& part, const TensorMap& out_map, unsigned own_out, int group, float* lse,
                   int length, int heads) {
    if (threadIdx.x % WARPGROUP == 0) bulk_wait_read();
    float share[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int query = part.query + 8 * half;
        float total = part.total[half];
        total += __shfl_xor_sync(ALL_LANES, total, 1);  // the row's 4 lanes, as in raise
        total += __shfl_xor_sync(ALL_LANES, total, 2);
        if (threadIdx.x % 4 == 0 && query < length) {
            const long long row = (long long)part.item.b * heads + part.item.head;
            lse[row * length + query] = (part.shift[half] + __log2f(total)) * LN_2;
        }
        share[half] = __fdividef(1.0f, total);
    }
    named_barrier_sync(OWN + group, WARPGROUP);  // the last item's results have left own_out
    scale_rows(sum, share);
#pragma unroll
    for (int i = 0; i < PARTS; i++) store_sum(own_out + i * GROUP_ROWS * TILE_ROW_BYTES, sum[i]);
    fence_async_proxy();
    named_barrier_sync(OWN + group, WARPGROUP);  // the results, written above by all, are copied by one
    if (threadIdx.x % WARPGROUP == 0) store_rows<PARTS * 64>(out_map, own_out, part.item.head, part.first, part.item.b);
}

// A warpgroup: its 64 queries of each item.
template <int HEAD_DIM, int STAGES>
void attend(const Layout<HEAD_DIM, STAGES>& at, const TensorMap& out_map, float* lse, const int* start, int length, int heads,
            float scale) {
    constexpr int PARTS = HEAD_DIM / 64;
    const int group = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARP;
    const int my_turn = TURNS + group, other_turn = TURNS + 1 - group;
    const unsigned own_out = at.outs + group * at.OWN_BYTES;
    const unsigned long long all_keys = tile_descriptor(at.keys), all_values = tile_descriptor(at.values);
    const float scale2 = scale * LOG2_E;
    float s[KEYS / 2] = {}, kept[2], sum[PARTS][32] = {};
    unsigned p[KEYS / 16][4];
    unsigned round = 0, step = 0, before;  // number of the item; of the tiles of keys that s and p are of
    Part part;
    const auto take_part = [&] {
        wait(at.query_full[round % 2], round / 2 % 2);
        const Item item = at.items[round % 2];
        if (item.first < 0) return false;
        part.take(item, group, tile_descriptor(at.queries + (round % 2 * GROUPS + group) * at.OWN_BYTES), start, length);
        return true;
    };
    const auto start_scores = [&] {
        wait(at.key_full[step % STAGES], step / STAGES % 2);
        wgmma_fence();
        multiply_keys<HEAD_DIM>(s, part.queries, advance(all_keys, step % STAGES * at.TILE_BYTES));
    };
    const auto start_values = [&] { add_weighted(sum, p, advance(all_values, before % STAGES * at.TILE_BYTES)); };
    const auto finish_values = [&] {
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < PARTS; i++) warpgroup_fence_operand(sum[i]);
        if (lane == 0) arrive(at.value_empty[before % STAGES]);
    };
    // The scores are there: to exponentials. `finish`: what is still under way.
    const auto weigh = [&](auto finish) {
        warpgroup_fence_operand(s);
        if (lane == 0) arrive(at.key_empty[step % STAGES]);
        if (part.on_border()) hide_unseen(s, part.query, part.tile * KEYS, part.begin);
        raise(s, part.shift, part.total, kept, scale2);
        named_barrier_sync(my_turn, GROUPS * WARPGROUP);  // the other group has made its exponentials
        exponentials<0, EARLY>(s, part.shift, part.total, scale2);
        wait(at.value_full[step % STAGES], step / STAGES % 2);
        finish();
        exponentials<EARLY, KEYS / 2>(s, part.shift, part.total, scale2);
        named_barrier_arrive(other_turn, GROUPS * WARPGROUP);
    };

    if (group == 1) named_barrier_arrive(other_turn, GROUPS * WARPGROUP);  // the first turn is group 0's
    if (!take_part()) return;
    start_scores();
    wgmma_wait<0>();
    weigh([] {});
    round_weights(p, s);
    for (;;) {
        before = step++;
        for (part.tile--; part.tile >= part.item.lowest; part.tile--) {
            start_scores();
            start_values();
            wgmma_wait<1>();
            weigh(finish_values);
            scale_rows(sum, kept);
            round_weights(p, s);
            before = step++;
        }
        if (lane == 0) arrive(at.query_empty[round % 2]);
        round++;
        const Part done = part;
        if (!take_part()) break;
        start_scores();
        start_values();
        wgmma_wait<1>();
        weigh(finish_values);
        store_results(sum, done, out_map, own_out, group, lse, length, heads);
        clear(sum);
        round_weights(p, s);
    }
    wgmma_fence();
    start_values();
    finish_values();
    store_results(sum, part, out_map, own_out, group, lse, length, heads);
}

// Grid: a block a multiprocessor, at most one an item. counts: items taken, and blocks done; zero between launches. `section`:
// heads, of all sequences', taken together.
template <int HEAD_DIM, int STAGES>
__global__ void __launch_bounds__((GROUPS + 1) * WARPGROUP, 1)
    attention_forward(const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap qkv_map, float* lse,
                      const int* start, int* counts, int batch, int length, int heads, int kv_heads, int section, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Layout<HEAD_DIM, STAGES> at(memory);
    if (threadIdx.x == 0) at.init();
    __syncthreads();  // the barriers are ready
    if (threadIdx.x >= GROUPS * WARPGROUP) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x == GROUPS * WARPGROUP) copy_items(at, qkv_map, start, counts, batch, length, heads, kv_heads, section);
        return;
    }
    warpgroup_reg_alloc<240>();
    attend(at, out_map, lse, start, length, heads, scale);
    if (threadIdx.x < WARPGROUP) named_barrier_sync(TURNS, GROUPS * WARPGROUP);  // the other group's last arrival
    if (threadIdx.x % WARPGROUP == 0) bulk_wait();                       // they read this block's memory
}
