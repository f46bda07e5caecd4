// Causal grouped-query attention for Hopper (sm_90a): wgmma
// on tiles loaded by TMA. bf16, head dims 64 and 128.
//
//     s[t, j] = q[t] . k[j] / sqrt(D)  for start[b, t] <= j <= t        lse[t] = log sum_j exp(s[t, j])
//     out[t]  = sum_j exp(s[t, j] - lse[t]) v[j]
//
// Layout: see attention_scalar.cu, which also says what is saved.
// Block: persistent. A work tile is QUERY_TILE queries of one head. The inner loop covers the key tiles that
//     they attend to, from the diagonal down. A work tile's first S overlaps the last PV of the one before.
// Consumers (warpgroups 0 and 1): 64 queries each, output accumulators in registers. Ping-pong scheduling:
//     named barriers let one warpgroup's exponentials overlap the other's matmuls. A warpgroup issues the
//     next tile's S = Q K^T, be it the next work tile's, before this tile's PV.
// Producer (thread 0 of warpgroup 2): fetches work tiles, loads q of the next work tile, and k and v up to
//     STAGES tiles ahead.
// Schedule: an atomic counter issues the longest work tiles first, one section of heads at a time. The K and
//     V of a section fit in L2.
// Masking: key tiles that no query attends to are skipped. Only tiles on a border are masked element by
//     element. TMA reads rows past the end of a sequence as zeros and does not store them.
// Precision: bf16 operands, fp32 accumulators; softmax and lse in fp32. p is rounded to bf16 as an operand;
//     out is rounded once. exp is 2^x with log2(e) / sqrt(D) folded into the scale.
// Determinism: every sum has a fixed order. The atomics decide which block computes a tile, not what.
// Source: Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3), sections 3.1 and 3.2. The design and what
//     else was timed: docs/kernels/attention.md. Tile sizes and register counts: not tuned.

#include "attention_hopper_forward.cuh"

// Of a thread's KEY_TILE / 2 exponentials of a tile, those computed before PV is waited
// for. At D = 64, 48 are 1 to 3 % faster than 32 (kernels/NOTES.md, 2026-11-30).
constexpr int EARLY_EXPONENTIALS = KEY_TILE / 2 * 3 / 4;
// Named barriers of each warpgroup: its turn at the exponentials; a sync of its own threads.
constexpr int SOFTMAX_BARRIER = 1, WARPGROUP_BARRIER = SOFTMAX_BARRIER + CONSUMERS;
constexpr float LN_2 = 0.6931471805599453f;
static_assert(CONSUMERS == 2, "ping-pong is between two warpgroups");

// Causal and document mask of S (queries x keys): masked scores become -inf. `row`:
// the first of the lane's two queries. doc_begin: where the document of each begins. Each query attends to
// itself, and its own key is in the key tile that comes first. So the row maximum is finite from then on.
inline void apply_mask(float (&s)[KEY_TILE / 2], int row, int first_key, const int (&doc_begin)[2]) {
    const int lane_key = first_key + threadIdx.x % 4 * 2;
    // Masks use one bit per accumulator column of the lane, 2 of every 8 keys. This takes fewer instructions
    // than two comparisons per score. bits_below(key) sets the bits of the keys below lane_key + key.
    const auto bits_below = [](int key) {
        const int bits = key / 8 * 2 + min(key % 8, 2);
        return key <= 0 ? 0u : bits >= KEY_TILE / 4 ? ~0u : (1u << bits) - 1;
    };
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int lowest = doc_begin[half] - lane_key, highest = row + 8 * half - lane_key;
        const unsigned attended = bits_below(highest + 1) & ~bits_below(lowest);
#pragma unroll
        for (int i = 2 * half; i < KEY_TILE / 2; i += 4)
#pragma unroll
            for (int odd = 0; odd < 2; odd++)
                if (!(attended >> (i / 4 * 2 + odd) & 1)) s[i + odd] = minus_infinity();
    }
}

// Online softmax: updates the running maximum of the lane's two rows, in log2 units, and rescales their
// running sums. `rescale` is 2^(old maximum - new maximum), the factor for the output accumulators.
inline void update_row_max(const float (&s)[KEY_TILE / 2], float (&row_max)[2], float (&row_sum)[2],
                           float (&rescale)[2], float scale_log2) {
    float new_max[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float tile_max = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
        for (int i = 2 * half + 4; i < KEY_TILE / 2; i += 4)
            tile_max = fmaxf(tile_max, fmaxf(s[i], s[i + 1]));
        // A row is spread over 4 lanes. The warp is converged here.
        tile_max = fmaxf(tile_max, __shfl_xor_sync(ALL_LANES, tile_max, 1));
        tile_max = fmaxf(tile_max, __shfl_xor_sync(ALL_LANES, tile_max, 2));
        new_max[half] = fmaxf(row_max[half], tile_max * scale_log2);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        rescale[half] = exp2_approx(row_max[half] - new_max[half]);
        row_max[half] = new_max[half];
        row_sum[half] *= rescale[half];
    }
}

// Replaces scores BEGIN .. END - 1 by their exponentials, and adds these to the rows' sums.
template <int BEGIN, int END>
void exponentials(float (&s)[KEY_TILE / 2], const float (&row_max)[2], float (&row_sum)[2],
                  float scale_log2) {
#pragma unroll
    for (int i = BEGIN; i < END; i++) {
        s[i] = exp2_approx(s[i] * scale_log2 - row_max[i / 2 % 2]);
        row_sum[i / 2 % 2] += s[i];
    }
}

// Issues S = Q K^T of a warpgroup's q and a tile of k.
template <int HEAD_DIM>
void gemm_qk(float (&s)[KEY_TILE / 2], unsigned long long q_desc, unsigned long long k_desc) {
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++)
        wgmma_ss(s, advance(q_desc, k / 4 * WARPGROUP_ROWS * TILE_ROW_BYTES + k % 4 * 32),
                 advance(k_desc, k / 4 * KEY_TILE * TILE_ROW_BYTES + k % 4 * 32), k > 0);
    wgmma_commit();
}

// Issues acc += P V, P in registers.
template <int D_TILES>
void gemm_pv(float (&acc)[D_TILES][32], const unsigned (&p_frag)[KEY_TILE / 16][4],
             unsigned long long v_desc) {
#pragma unroll
    for (int k = 0; k < KEY_TILE / 16; k++)
#pragma unroll
        for (int i = 0; i < D_TILES; i++)
            wgmma_rs(acc[i], p_frag[k],
                     advance(v_desc, i * KEY_TILE * TILE_ROW_BYTES + k * 16 * TILE_ROW_BYTES));
    wgmma_commit();
}

inline void round_probs(unsigned (&p_frag)[KEY_TILE / 16][4], const float (&s)[KEY_TILE / 2]) {
#pragma unroll
    for (int k = 0; k < KEY_TILE / 16; k++) round_fragment(p_frag[k], s, k);
}

template <int D_TILES>
void clear(float (&acc)[D_TILES][32]) {
#pragma unroll
    for (int i = 0; i < D_TILES; i++)
#pragma unroll
        for (int e = 0; e < 32; e++) acc[i][e] = 0;
}

template <int D_TILES>
void scale_rows(float (&acc)[D_TILES][32], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < D_TILES; i++)
#pragma unroll
        for (int e = 0; e < 32; e++) acc[i][e] *= factor[e / 2 % 2];
}

// Warpgroup: normalises its accumulators and stores them by
// TMA, through its own tile of shared memory; stores lse.
template <int D_TILES>
void store_out(float (&acc)[D_TILES][32], const TileState& tile, const TensorMap& out_map, unsigned out_tile,
               int warpgroup, float* lse, int length, int heads) {
    if (threadIdx.x % WARPGROUP == 0) bulk_wait_read();
    float inverse_sum[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int query = tile.row + 8 * half;
        float sum = tile.row_sum[half];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);  // over the row's 4 lanes, as in update_row_max
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (threadIdx.x % 4 == 0 && query < length) {
            const long long row = (long long)tile.work.b * heads + tile.work.head;
            lse[row * length + query] = (tile.row_max[half] + __log2f(sum)) * LN_2;
        }
        inverse_sum[half] = __fdividef(1.0f, sum);
    }
    // Separates the previous TMA store's reads of out_tile,
    // which thread 0 has waited for, from the writes below.
    named_barrier_sync(WARPGROUP_BARRIER + warpgroup, WARPGROUP);
    scale_rows(acc, inverse_sum);
#pragma unroll
    for (int i = 0; i < D_TILES; i++)
        store_accumulator(out_tile + i * WARPGROUP_ROWS * TILE_ROW_BYTES, acc[i]);
    fence_async_proxy();
    // Separates all threads' writes from the TMA store of one thread.
    named_barrier_sync(WARPGROUP_BARRIER + warpgroup, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0)
        tma_store_rows<D_TILES * 64>(out_map, out_tile, tile.work.head, tile.first_row, tile.work.b);
}

// Consumer warpgroup: its 64 queries of each work tile.
template <int HEAD_DIM, int STAGES>
void consumer(const SmemLayout<HEAD_DIM, STAGES>& smem, const TensorMap& out_map, float* lse,
              const int* start, int length, int heads, float scale) {
    constexpr int D_TILES = HEAD_DIM / 64;
    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARP;
    const int own_turn = SOFTMAX_BARRIER + warpgroup, other_turn = SOFTMAX_BARRIER + 1 - warpgroup;
    const unsigned out_tile = smem.out + warpgroup * smem.WARPGROUP_BYTES;
    const unsigned long long k_desc = tile_descriptor(smem.k), v_desc = tile_descriptor(smem.v);
    const float scale_log2 = scale * LOG2_E;
    float s[KEY_TILE / 2] = {}, rescale[2], acc[D_TILES][32] = {};
    unsigned p_frag[KEY_TILE / 16][4];
    // work_iter counts work tiles. step and prev_step count key tiles over all work tiles: s holds the scores
    // of tile `step`, p_frag the p of tile `prev_step`.
    unsigned work_iter = 0, step = 0, prev_step;
    TileState tile;
    const auto next_work_tile = [&] {
        wait(smem.q_full[work_iter % 2], work_iter / 2 % 2);
        const WorkTile work = smem.work_tiles[work_iter % 2];
        if (work.first_query < 0) return false;
        const unsigned q = smem.q + (work_iter % 2 * CONSUMERS + warpgroup) * smem.WARPGROUP_BYTES;
        tile.init(work, warpgroup, tile_descriptor(q), start, length);
        return true;
    };
    const auto issue_qk = [&] {
        wait(smem.k_full[step % STAGES], step / STAGES % 2);
        wgmma_fence();
        gemm_qk<HEAD_DIM>(s, tile.q_desc, advance(k_desc, step % STAGES * smem.TILE_BYTES));
    };
    const auto issue_pv = [&] {
        gemm_pv(acc, p_frag, advance(v_desc, prev_step % STAGES * smem.TILE_BYTES));
    };
    const auto wait_pv = [&] {
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < D_TILES; i++) warpgroup_fence_operand(acc[i]);
        if (lane == 0) arrive(smem.v_empty[prev_step % STAGES]);
    };
    // S is complete: computes the exponentials. `wait_pending`: waits for the PV in flight, if
    // there is one. Row maximum, rescaling and rounding stay outside of the ordered section.
    const auto softmax_step = [&](auto wait_pending) {
        warpgroup_fence_operand(s);
        if (lane == 0) arrive(smem.k_empty[step % STAGES]);
        if (tile.needs_mask()) apply_mask(s, tile.row, tile.key_tile * KEY_TILE, tile.doc_begin);
        update_row_max(s, tile.row_max, tile.row_sum, rescale, scale_log2);
        // Separates the other warpgroup's exponentials from this one's.
        named_barrier_sync(own_turn, CONSUMERS * WARPGROUP);
        exponentials<0, EARLY_EXPONENTIALS>(s, tile.row_max, tile.row_sum, scale_log2);
        // ptxas hoists wgmma_wait to the last branch before it. The spin loop of the mbarrier wait below, for
        // the next PV's v, is put here to be that branch: early exponentials overlap PV, others follow it.
        wait(smem.v_full[step % STAGES], step / STAGES % 2);
        wait_pending();
        exponentials<EARLY_EXPONENTIALS, KEY_TILE / 2>(s, tile.row_max, tile.row_sum, scale_log2);
        named_barrier_arrive(other_turn, CONSUMERS * WARPGROUP);
    };

    if (warpgroup == 1) named_barrier_arrive(other_turn, CONSUMERS * WARPGROUP);  // warpgroup 0 goes first
    if (!next_work_tile()) return;
    issue_qk();
    wgmma_wait<0>();
    softmax_step([] {});
    round_probs(p_frag, s);
    for (;;) {
        prev_step = step++;
        for (tile.key_tile--; tile.key_tile >= tile.work.lowest_key_tile; tile.key_tile--) {
            issue_qk();
            issue_pv();
            wgmma_wait<1>();  // S is complete; PV may be in flight
            softmax_step(wait_pv);
            scale_rows(acc, rescale);
            round_probs(p_frag, s);
            prev_step = step++;
        }
        if (lane == 0) arrive(smem.q_empty[work_iter % 2]);
        work_iter++;
        const TileState finished = tile;
        if (!next_work_tile()) break;
        issue_qk();
        issue_pv();
        wgmma_wait<1>();
        softmax_step(wait_pv);
        store_out(acc, finished, out_map, out_tile, warpgroup, lse, length, heads);
        clear(acc);
        round_probs(p_frag, s);
    }
    wgmma_fence();
    issue_pv();
    wait_pv();
    store_out(acc, tile, out_map, out_tile, warpgroup, lse, length, heads);
}

// Grid: one block per SM, at most one per work tile. counts = {tile counter, finished blocks};
// both are zero between launches. `section`: (batch, head) pairs per scheduling section.
template <int HEAD_DIM, int STAGES>
__global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    attention_forward(const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap qkv_map,
                      float* lse, const int* start, int* counts, int batch, int length, int heads,
                      int kv_heads, int section, float scale) {
    extern __shared__ __align__(1024) unsigned char smem_base[];
    const SmemLayout<HEAD_DIM, STAGES> smem(smem_base);
    if (threadIdx.x == 0) smem.init();
    __syncthreads();  // separates the initialisation of the mbarriers from their use
    if (threadIdx.x >= CONSUMERS * WARPGROUP) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x == CONSUMERS * WARPGROUP)
            producer(smem, qkv_map, start, counts, batch, length, heads, kv_heads, section);
        return;
    }
    warpgroup_reg_alloc<240>();
    consumer(smem, out_map, lse, start, length, heads, scale);
    // Takes warpgroup 1's last arrival: no named barrier may be left half full.
    if (threadIdx.x < WARPGROUP) named_barrier_sync(SOFTMAX_BARRIER, CONSUMERS * WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) bulk_wait();  // the last TMA stores read this block's shared memory
}
