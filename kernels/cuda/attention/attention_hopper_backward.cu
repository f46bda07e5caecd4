// Backward pass of attention_hopper.cu: one kernel, five matmuls. sm_90a, bf16, head dims 64 and 128.
//
//     s[t, j] = q[t] . k[j] / sqrt(D)        delta[t] = dout[t] . out[t]        lse: natural logarithm
//     p[t, j] = exp(s[t, j] - lse[t])        ds[t, j] = p[t, j] * (dout[t] . v[j] - delta[t]) / sqrt(D)
//     dq[t]   = sum_j ds[t, j] k[j]          dk[j] = sum_t ds[t, j] q[t]      dv[j] = sum_t p[t, j] dout[t]
//
// Layout: see attention_scalar.cu, whose attention_delta computes delta.
// Block: persistent. A work tile is KEY_TILE keys of one KV head. The inner loop covers its query heads, and
//     for each head the tiles of QUERY_TILE queries from the diagonal onward, in rising order.
// Consumers (warpgroups 0 and 1): 64 keys each, dk and dv in registers. They compute S^T = K Q^T and
//     dP^T = V dO^T. P^T and dS^T are then register A operands (wgmma RS) of dV += P^T dO and
//     dK += dS^T Q. Only dS goes through shared memory, for dQ = dS K.
// Producer (warp 8): fetches work tiles. Loads q, dout, lse, delta and start up to STAGES query tiles ahead.
// dq writers (warps 9 and 10): add dq tiles to dq_sum (fp32), diagonal key tile first. The last key tile's
//     writer rounds the sum and stores it to dqkv.
// dbias: the consumers and the dq writers store column sums to partial (B, key tiles, CONSUMERS, width of
//     dqkv), unless it is null. sum_rows.cu adds its rows.
// Precision: bf16 operands, fp32 accumulators; exp2, lse and delta in fp32. p and ds are rounded to bf16 as
//     operands; ds is computed from the rounded p. dbias sums dk and dv after they are rounded, dq before.
// Determinism: dq_semaphore fixes the order of dq's sums. Without `ordered` only the first and the last
//     contribution to a dq tile keep their places. The tile counter decides who computes, not what.
// Source: Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3), section 3 and algorithm 3 of its
//     supplement; Dao 2023, arXiv:2307.08691, algorithm 2. The design: docs/kernels/attention.md.
// Tile sizes, stages and register counts: not tuned.

#include "attention_hopper_backward_dq.cuh"

// Causal and document mask of S^T (keys x queries): masked scores become -inf. All count from the work
// tile's first key: `key`, the lane's first; first_query; doc_begin, each query's first key, at least 0.
template <int TILE>
void apply_mask(float (&s)[TILE / 2], int key, int first_query, const unsigned char* doc_begin) {
#pragma unroll
    for (int i = 0; i < TILE / 2; i += 4)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int column = i * 2 + threadIdx.x % 4 * 2 + odd;
            const int lowest = doc_begin[column] - key, highest = first_query + column - key;
#pragma unroll
            for (int half = 0; half < 2; half++)
                if ((8 * half < lowest) | (8 * half > highest)) s[i + 2 * half + odd] = minus_infinity();
        }
}

// Issues acc = A B^T: the warpgroup's 64 rows of K or V by a tile of q or dout. `a_desc` describes A.
template <int HEAD_DIM>
void gemm_scores(float (&acc)[QUERY_TILE<HEAD_DIM> / 2], unsigned long long a_desc, unsigned tile) {
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++)
        wgmma_ss(acc, advance(a_desc, k / 4 * KEY_TILE * TILE_ROW_BYTES + k % 4 * 32),
                 advance(tile_descriptor(tile), k / 4 * QUERY_TILE<HEAD_DIM> * TILE_ROW_BYTES + k % 4 * 32),
                 k > 0);
    wgmma_commit();
}

// Issues acc += A B: fragments of P^T or dS^T by a tile of dout or q.
template <int D_TILES, int K_STEPS>
void gemm_dkv(float (&acc)[D_TILES][32], const unsigned (&a_frag)[K_STEPS][4], unsigned tile) {
#pragma unroll
    for (int k = 0; k < K_STEPS; k++)
#pragma unroll
        for (int i = 0; i < D_TILES; i++)
            wgmma_rs(acc[i], a_frag[k],
                     advance(tile_descriptor(tile), (i * K_STEPS + k) * 16 * TILE_ROW_BYTES));
    wgmma_commit();
}

// Issues dq = dS K. A row of either tile is one key, the index summed over: both are MN-major.
inline void gemm_dq(float (&dq)[32], unsigned long long ds_desc, unsigned long long k_desc) {
#pragma unroll
    for (int k = 0; k < KEY_TILE / 16; k++)
        wgmma_ss<true, true>(dq, advance(ds_desc, k * 16 * TILE_ROW_BYTES),
                             advance(k_desc, k * 16 * TILE_ROW_BYTES), k > 0);
    wgmma_commit();
}

// p = 2^(s * scale_log2 - lse2), lse2 = lse * log2(e), rounded to the fragments of P^T.
template <int K_STEPS>
void scores_to_probs(float (&s)[8 * K_STEPS], unsigned (&p_frag)[K_STEPS][4], const float* row_lse2,
                     float scale_log2) {
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
#pragma unroll
        for (int i = 8 * k; i < 8 * k + 8; i += 4) {
            const float2 lse2 = *reinterpret_cast<const float2*>(row_lse2 + i * 2);
#pragma unroll
            for (int e = i; e < i + 4; e++) s[e] = exp2_approx(s[e] * scale_log2 - (e % 2 ? lse2.y : lse2.x));
        }
        round_fragment(p_frag[k], s, k);
    }
}

// ds = p (dp - delta), in place, without the factor 1 / sqrt(D). p is read from its rounded fragments:
// to keep the unrounded p as well would take too many registers.
template <int K_STEPS>
void probs_to_ds(float (&dp)[8 * K_STEPS], const unsigned (&p_frag)[K_STEPS][4], const float* row_delta) {
#pragma unroll
    for (int i = 0; i < 8 * K_STEPS; i += 4) {
        const float2 delta = *reinterpret_cast<const float2*>(row_delta + i * 2);
#pragma unroll
        for (int e = i; e < i + 4; e += 2) {
            const unsigned p = p_frag[e / 8][e / 2 % 4];
            dp[e] = __uint_as_float(p << 16) * (dp[e] - delta.x);
            dp[e + 1] = __uint_as_float(p & 0xffff0000) * (dp[e + 1] - delta.y);
        }
    }
}

// Rounds ds to the fragments of dS^T, and stores them to the warpgroup's rows of the ds buffer.
template <int K_STEPS>
void store_ds(unsigned (&ds_frag)[K_STEPS][4], const float (&ds)[8 * K_STEPS], unsigned warpgroup_rows) {
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
        round_fragment(ds_frag[k], ds, k);
        store_fragment(warpgroup_rows + k / 4 * KEY_TILE * TILE_ROW_BYTES, k % 4, ds_frag[k]);
    }
    fence_async_proxy();  // wgmma reads ds through the async proxy
}

// Stores a warpgroup's dq to shared memory in fragment order, and signals its dq-writer warp.
inline void stage_dq(const float (&dq)[32], float4* buffer, unsigned dq_full) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        buffer[i * WARPGROUP + threadIdx.x % WARPGROUP] =
            float4{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
    fence_async_proxy();  // bulk copies read it through the async proxy
    __syncwarp();         // all lanes have written before lane 0 arrives for the warp
    if (threadIdx.x % WARP == 0) arrive(dq_full);
}

// Warpgroup: stages its dk and dv in the K+V buffer, issues their TMA stores, and writes its row of partial.
template <int HEAD_DIM, int D_TILES>
void store_dkv(float (&dk)[D_TILES][32], float (&dv)[D_TILES][32], const TensorMap& dqkv_map, float* partial,
               unsigned k_buffer, unsigned v_buffer, const WorkTile& work, int length, int heads,
               int kv_heads, float scale) {
    constexpr int WARPGROUP_TILE_BYTES = WARPGROUP_ROWS * TILE_ROW_BYTES;
    const int warpgroup = threadIdx.x / WARPGROUP, first = work.first_key + warpgroup * WARPGROUP_ROWS;
    const int k_head = heads + work.kv_head;
    const unsigned dk_tile = k_buffer + warpgroup * D_TILES * WARPGROUP_TILE_BYTES;
    const unsigned dv_tile = v_buffer + warpgroup * D_TILES * WARPGROUP_TILE_BYTES;
    // The last reads of K and V precede the writes below. At D = 64 dQ's reads of ds precede the next ds.
    named_barrier_sync(DS_BARRIER, CONSUMER_THREADS);
#pragma unroll
    for (int i = 0; i < D_TILES; i++) {
        warpgroup_fence_operand(dk[i]);
        warpgroup_fence_operand(dv[i]);
#pragma unroll
        for (int e = 0; e < 32; e++) dk[i][e] *= scale;
        store_accumulator(dk_tile + i * WARPGROUP_TILE_BYTES, dk[i]);
        store_accumulator(dv_tile + i * WARPGROUP_TILE_BYTES, dv[i]);
    }
    fence_async_proxy();
    // Separates all threads' writes from the TMA stores of one thread and from the sums of all.
    named_barrier_sync(WARPGROUP_BARRIER + warpgroup, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
        tma_store_rows<HEAD_DIM>(dqkv_map, dk_tile, k_head, first, work.b);
        tma_store_rows<HEAD_DIM>(dqkv_map, dv_tile, k_head + kv_heads, first, work.b);
    }
    if (!partial) return;
    // WAR: these buffers are written again only after all warps have read them. With KV_ROTATES_WITH_DS the
    // next work tile's first DS_BARRIER guarantees it, otherwise arrive_kv_empty.
    float* sums =
        work.partial_row(partial, warpgroup, length, (heads + 2 * kv_heads) * HEAD_DIM) + k_head * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < D_TILES; i++) {
        sum_columns(sums + i * 64, dk_tile + i * WARPGROUP_TILE_BYTES);
        sum_columns(sums + kv_heads * HEAD_DIM + i * 64, dv_tile + i * WARPGROUP_TILE_BYTES);
    }
}

// Consumer warpgroup: the matmuls of its 64 keys of each work tile.
template <int HEAD_DIM>
void consumer(const SmemLayout<HEAD_DIM>& smem, const TensorMap& dqkv_map, float* partial,
              unsigned char* smem_base, int length, int heads, int kv_heads, float scale) {
    constexpr int TILE = QUERY_TILE<HEAD_DIM>, D_TILES = HEAD_DIM / 64;
    constexpr int K_D_TILE_BYTES = KEY_TILE * TILE_ROW_BYTES;
    constexpr int WARPGROUP_TILE_BYTES = WARPGROUP_ROWS * TILE_ROW_BYTES;
    // From the warp-uniform warp_number(): tile addresses then stay in uniform registers.
    const int warpgroup = warp_number() * WARP / WARPGROUP, first_row = warpgroup * WARPGROUP_ROWS;
    const int thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % WARP;
    const float scale_log2 = scale * LOG2_E;
    const float* lse2_delta = reinterpret_cast<float*>(smem_base + (smem.lse2_delta - smem.kv));
    const unsigned char* doc_begins = smem_base + (smem.doc_begin - smem.kv);
    float s[TILE / 2] = {}, dp[TILE / 2] = {}, dq[32] = {};  // 0: wgmma's accumulators are inputs too
    unsigned a_frag[TILE / 16][4];  // P^T, then dS^T
    RotatingBuffers<HEAD_DIM> buffers(smem);
    unsigned step = 0;  // counts query tiles of all work tiles
    const auto issue_scores = [&](unsigned long long k_desc) {
        wait(smem.q_full[step % STAGES], step / STAGES % 2);
        wgmma_fence();
        gemm_scores<HEAD_DIM>(s, k_desc, smem.q + step % STAGES * smem.Q_BYTES);
    };
    for (unsigned work_iter = 0;; work_iter++) {
        const WorkTile& work = wait_work_tile(smem, work_iter);
        if (work.query_tiles == 0) return;
        const unsigned k_buffer = buffers.kv, v_buffer = k_buffer + smem.K_BYTES;
        const unsigned long long k_desc = tile_descriptor(k_buffer + warpgroup * WARPGROUP_TILE_BYTES);
        const unsigned long long v_desc = tile_descriptor(v_buffer + warpgroup * WARPGROUP_TILE_BYTES);
        // dQ is split between the warpgroups by queries (D = 64), or by columns of K (D = 128).
        const unsigned long long dq_k_desc =
            tile_descriptor(k_buffer + (D_TILES == 2) * warpgroup * K_D_TILE_BYTES);
        float dk[D_TILES][32] = {}, dv[D_TILES][32] = {};
        issue_scores(k_desc);
        if (KV_ROTATES_WITH_DS<HEAD_DIM>) {
            arrive_kv_empty(smem);  // the next K and V go to another buffer of the rotation
            // WAR: TMA may still store the previous work tile's dk and dv. Their buffer is overwritten by
            // this tile's second ds, after a DS_BARRIER, or else by the next K and V, after a q_empty.
            if (thread == 0) bulk_wait_read();
        }
        wait(smem.kv_full[1], work_iter % 2);  // V; wait_work_tile has waited for K
        wgmma_wait<0>();
        warpgroup_fence_operand(s);
        int first_query = 0;  // of the query tile, from the work tile's first key; 0 for each head
        for (const unsigned end = step + work.steps(); step < end;) {
            const unsigned stage = step % STAGES;
            const unsigned q_tile = smem.q + stage * smem.Q_BYTES;
            const unsigned dout_tile = smem.dout + stage * smem.Q_BYTES;
            const float* row_lse2 = lse2_delta + stage * 2 * TILE + lane % 4 * 2;
            wait(smem.dout_full[stage], step / STAGES % 2);
            wgmma_fence();
            gemm_scores<HEAD_DIM>(dp, v_desc, dout_tile);
            const unsigned char* doc_begin = doc_begins + stage * TILE;
            // At D = 128 warpgroup 1's first scores are all masked, and needed: dQ reads the zeros of its dS.
            if (first_query < first_row + WARPGROUP_ROWS - 1 || doc_begin[TILE - 1] > first_row)
                apply_mask<TILE>(s, first_row + thread / WARP * 16 + lane / 4, first_query, doc_begin);
            scores_to_probs(s, a_frag, row_lse2, scale_log2);
            wgmma_fence();
            gemm_dkv(dv, a_frag, dout_tile);
            wgmma_wait<1>();  // dP^T is complete; dV may be in flight
            warpgroup_fence_operand(dp);
            probs_to_ds(dp, a_frag, row_lse2 + TILE);
            wgmma_wait<0>();  // dV has read a_frag
            // WAR: the last dQ that read this ds buffer was complete in both warpgroups before the last
            // DS_BARRIER: the previous step's, or store_dkv's in the first step of a work tile.
            store_ds(a_frag, dp, buffers.ds + warpgroup * WARPGROUP_TILE_BYTES);
            wgmma_fence();
            gemm_dkv(dk, a_frag, q_tile);
            // Separates both warpgroups' writes of ds from the dQ below, which reads the rows of both.
            named_barrier_sync(DS_BARRIER, CONSUMER_THREADS);
            wgmma_fence();
            gemm_dq(dq, tile_descriptor(buffers.ds + (D_TILES == 1) * warpgroup * K_D_TILE_BYTES), dq_k_desc);
            wgmma_wait<1>();  // dK is complete: the stage's last reader
            if (lane == 0) arrive(smem.q_empty[stage]);
            step++;
            // The next step's S^T, on every path: else ptxas would serialise all wgmmas. After a work tile's
            // last step it is discarded. After the last work tile the producer completes one more q_full.
            issue_scores(k_desc);
            // Waits until the previous step's dq has left the buffer. `step` is n + 1 in step n, which waits
            // for phase n - 1: the same parity. In step 0 the mbarrier is new, and parity 1 passes at once.
            wait(smem.dq_empty[warpgroup], step % 2);
            wgmma_wait<1>();  // dQ is complete; S^T may be in flight
            warpgroup_fence_operand(dq);
            stage_dq(dq,
                     reinterpret_cast<float4*>(smem_base + (smem.dq - smem.kv) + warpgroup * smem.DQ_BYTES),
                     smem.dq_full[warpgroup]);
            wgmma_wait<0>();  // S^T is complete: no accumulator is pending across the back-edge
            warpgroup_fence_operand(s);
            buffers.next_step();
            first_query = first_query + TILE == work.query_tiles * TILE ? 0 : first_query + TILE;
        }
        wgmma_wait<0>();  // nothing is in flight, but ptxas does not know it after a loop
        store_dkv<HEAD_DIM>(dk, dv, dqkv_map, partial, k_buffer, v_buffer, work, length, heads, kv_heads,
                            scale);
        if (!KV_ROTATES_WITH_DS<HEAD_DIM>) {
            if (thread == 0) bulk_wait_read();  // the stores have read dk and dv from the K+V buffer
            arrive_kv_empty(smem);
        }
        buffers.next_work_tile();
    }
}

// Grid: one block per SM, at most one per work tile. The launcher zeroes dq_semaphore and tile_counter.
template <int HEAD_DIM>
__global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    attention_backward(const __grid_constant__ TensorMap dqkv_map, const __grid_constant__ TensorMap dout_map,
                       const __grid_constant__ TensorMap qkv_map, bf16* dqkv, float* partial, float* dq_sum,
                       int* dq_semaphore, int* tile_counter, const float* delta, const float* lse,
                       const int* start, int batch, int length, int heads, int kv_heads, bool ordered,
                       float scale) {
    extern __shared__ __align__(1024) unsigned char smem_base[];
    const SmemLayout<HEAD_DIM> smem(smem_base);
    if (threadIdx.x == 0) smem.init();
    __syncthreads();  // separates the initialisation of the mbarriers from their use
    const int warp = warp_number() - CONSUMER_THREADS / WARP;
    if (warp < 0) {
        warpgroup_reg_alloc<224>();
        consumer(smem, dqkv_map, partial, smem_base, length, heads, kv_heads, scale);
        if (threadIdx.x % WARPGROUP == 0) bulk_wait();  // the last TMA stores read shared memory until then
    } else {
        warpgroup_reg_dealloc<56>();
        if (warp == 0)
            producer(smem, dout_map, qkv_map, smem_base, tile_counter, delta, lse, start, batch, length,
                     heads, kv_heads);
        else if (warp <= CONSUMERS)
            dq_writer(smem, warp - 1, smem_base, dqkv, dq_sum, dq_semaphore, partial, start, length, heads,
                      kv_heads, ordered, scale);
    }
    // No warp exits before the last TMA transfer into this block's shared memory and the last arrival at its
    // mbarriers.
    __syncthreads();
}
