// The producer warp of attention_hopper_backward.cu, and what all its warps use: work tiles and the layout of
// shared memory. docs/kernels/attention.md describes the design.
#pragma once

#include "attention_hopper.cuh"

// Rows of a tile of q and dout. 64 at D = 128: the accumulators
// of S^T, dP^T, dk and dv must fit into registers.
template <int HEAD_DIM>
constexpr int QUERY_TILE = HEAD_DIM == 64 ? 128 : 64;

// Whether K+V have the size of one ds buffer, as at D = 64. Then K+V and ds rotate through three buffers.
template <int HEAD_DIM>
constexpr bool KV_ROTATES_WITH_DS = QUERY_TILE<HEAD_DIM> == 2 * HEAD_DIM;

constexpr int STAGES = 2;  // of q and dout; not tuned
// Up to three work tiles are live: prefetched, computed, and in the dq-writer warps. A power of two, so that
// the index stays right when the unsigned iteration wraps.
constexpr int WORK_TILE_SLOTS = 4;
constexpr int DQ_TILE = 64 * 64;  // floats of dq that one warpgroup contributes per step
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP;
constexpr int DS_BARRIER = 1;         // named barrier of both consumer warpgroups
constexpr int WARPGROUP_BARRIER = 2;  // the first of one named barrier per consumer warpgroup
constexpr int POLL_NS = 64;           // between two reads of a semaphore; not tuned

// One key tile of one KV head of one sequence, and the query
// tiles that attend to it. query_tiles == 0: no work left.
struct WorkTile {
    int first_key, kv_head, b;
    int first_query_tile, query_tiles;
    int head_begin, head_end;  // query heads that share the KV head

    // Work tile `number`. The key tiles of one head have consecutive numbers, the last key tile first, as the
    // order of dq's sums asks. So a head's longest work tile comes last; what that costs was not measured.
    WorkTile(int number, int length, int heads_per_kv_head, int kv_heads) {
        const int key_tiles = (length + KEY_TILE - 1) / KEY_TILE, pair = number / key_tiles;
        first_key = (key_tiles - 1 - number % key_tiles) * KEY_TILE;
        kv_head = pair % kv_heads;
        b = pair / kv_heads;
        first_query_tile = query_tiles = 0;
        head_begin = kv_head * heads_per_kv_head;
        head_end = head_begin + heads_per_kv_head;
    }

    // Warp: counts the query tiles. start never falls along a row. So a query tile attends to this key tile
    // if and only if its first query's document begins before the end of the key tile.
    template <int TILE>
    void find_query_tiles(const int* start, int length) {
        const int* starts = start + (long long)b * length;
        first_query_tile = first_key / TILE;
        for (int lane = threadIdx.x % WARP, found = WARP; found == WARP; query_tiles += found) {
            const int query = (first_query_tile + query_tiles + lane) * TILE;
            const bool attends = query < length && starts[min(query, length - 1)] < first_key + KEY_TILE;
            found = __popc(__ballot_sync(ALL_LANES, attends));
        }
    }

    int steps() const { return (head_end - head_begin) * query_tiles; }

    // The work tile's row `warpgroup` of partial (B, key tiles, CONSUMERS, width).
    float* partial_row(float* partial, int warpgroup, int length, int width) const {
        const int key_tiles = (length + KEY_TILE - 1) / KEY_TILE;
        return partial + (long long)((b * key_tiles + first_key / KEY_TILE) * CONSUMERS + warpgroup) * width;
    }
};

// Byte addresses in shared memory.
template <int HEAD_DIM>
struct SmemLayout {
    static constexpr int TILE = QUERY_TILE<HEAD_DIM>;
    static constexpr int K_BYTES = KEY_TILE * HEAD_DIM * 2, Q_BYTES = TILE * HEAD_DIM * 2;
    static constexpr int DS_BYTES = KEY_TILE * TILE * 2, DQ_BYTES = DQ_TILE * 4, LSE_BYTES = TILE * 4;
    unsigned kv, ds;       // K+V, and two ds buffers: the roles at the start, see RotatingBuffers
    unsigned q, dout;      // STAGES each
    unsigned dq, dq_prev;  // a warpgroup's part of dq, and its predecessors' sum: CONSUMERS each
    unsigned lse2_delta;    // (STAGES, 2, TILE) fp32
    unsigned doc_begin;  // (STAGES, TILE) bytes: the query's start minus first_key, clamped to 0 .. KEY_TILE
    Barriers kv_full, kv_empty, q_full, dout_full, q_empty, dq_full, dq_empty, dq_prev_full;
    WorkTile* work_tiles;  // WORK_TILE_SLOTS

    explicit SmemLayout(unsigned char* base)
        : kv(shared_address(base)), ds(kv + 2 * K_BYTES), q(ds + 2 * DS_BYTES), dout(q + STAGES * Q_BYTES),
          dq(dout + STAGES * Q_BYTES), dq_prev(dq + CONSUMERS * DQ_BYTES),
          lse2_delta(dq_prev + CONSUMERS * DQ_BYTES), doc_begin(lse2_delta + STAGES * 2 * LSE_BYTES),
          kv_full(doc_begin + STAGES * TILE), kv_empty(kv_full.end(2)), q_full(kv_empty.end(1)),
          dout_full(q_full.end(STAGES)), q_empty(dout_full.end(STAGES)), dq_full(q_empty.end(STAGES)),
          dq_empty(dq_full.end(CONSUMERS)), dq_prev_full(dq_empty.end(CONSUMERS)),
          work_tiles(reinterpret_cast<WorkTile*>(base + (dq_prev_full.end(CONSUMERS) - kv))) {}

    void init() const {
        kv_full.init(2, 1);                                     // 0: work tile and K, 1: V
        kv_empty.init(1, CONSUMER_THREADS / WARP + CONSUMERS);  // all consumer and dq-writer warps
        q_full.init(STAGES, WARP);
        dout_full.init(STAGES, 1);
        q_empty.init(STAGES, CONSUMER_THREADS / WARP);
        dq_full.init(CONSUMERS, WARPGROUP / WARP);
        dq_empty.init(CONSUMERS, 1);
        dq_prev_full.init(CONSUMERS, 1);
        fence_mbarrier_init();
    }
};

// The roles of the three large buffers: K+V, this step's ds, and the third, which is the next step's ds.
template <int HEAD_DIM>
struct RotatingBuffers {
    unsigned kv, ds, sum;  // sum: of the three addresses, so the third buffer is sum - kv - ds

    explicit RotatingBuffers(const SmemLayout<HEAD_DIM>& smem)
        : kv(smem.kv), ds(smem.ds), sum(smem.kv + 2 * smem.ds + smem.DS_BYTES) {}

    void next_step() { ds = sum - kv - ds; }

    // The next K+V go to the ds buffer that the last step did
    // not use. dk and dv are staged in the old K+V buffer.
    void next_work_tile() {
        if (!KV_ROTATES_WITH_DS<HEAD_DIM>) return;
        const unsigned idle = ds;
        next_step();
        kv = idle;
    }
};

// Warp: fetches the next work tile into `slot`.
template <int HEAD_DIM>
void fetch_work_tile(WorkTile& slot, int* tile_counter, const int* start, int batch, int length, int heads,
                     int kv_heads) {
    const int number = __shfl_sync(ALL_LANES, threadIdx.x % WARP == 0 ? atomicAdd(tile_counter, 1) : 0, 0);
    WorkTile work(number, length, heads / kv_heads, kv_heads);
    if (work.b < batch) work.find_query_tiles<QUERY_TILE<HEAD_DIM>>(start, length);
    if (threadIdx.x % WARP == 0) slot = work;
    // Separates lane 0's write of the slot from this warp's reads. kv_full does so for the other warps.
    __syncwarp();
}

// Producer warp: fetches work tiles and loads their data until no work is left.
template <int HEAD_DIM>
void producer(const SmemLayout<HEAD_DIM>& smem, const TensorMap& dout_map, const TensorMap& qkv_map,
              unsigned char* smem_base, int* tile_counter, const float* delta, const float* lse,
              const int* start, int batch, int length, int heads, int kv_heads) {
    constexpr int TILE = QUERY_TILE<HEAD_DIM>;
    const int lane = threadIdx.x % WARP;
    float* lse2_delta = reinterpret_cast<float*>(smem_base + (smem.lse2_delta - smem.kv)) + lane;
    unsigned char* doc_begin = smem_base + (smem.doc_begin - smem.kv) + lane;
    RotatingBuffers<HEAD_DIM> buffers(smem);
    unsigned step = 0;  // counts query tiles of all work tiles
    // Waits until the consumers have released the stage that
    // `step` reuses. At once for the first STAGES steps.
    const auto wait_empty = [&](unsigned step) { wait(smem.q_empty[step % STAGES], step / STAGES % 2 ^ 1); };
    // Loads a query tile: q and dout by TMA, lse, delta and start through registers.
    const auto load_query_tile = [&](const WorkTile& work, int head, int tile) {
        const unsigned stage = step % STAGES;
        float row_lse2[TILE / WARP], row_delta[TILE / WARP];
        unsigned char row_begin[TILE / WARP];
#pragma unroll
        for (int i = 0; i < TILE / WARP; i++) {
            const int query = tile * TILE + i * WARP + lane, clamped = min(query, length - 1);
            const long long index = ((long long)work.b * heads + head) * length + clamped;
            row_lse2[i] = query < length ? lse[index] * LOG2_E : -minus_infinity();  // p = 0 past the end
            row_delta[i] = delta[index];
            row_begin[i] =
                min(max(start[(long long)work.b * length + clamped] - work.first_key, 0), KEY_TILE);
        }
        wait_empty(step);
#pragma unroll
        for (int i = 0; i < TILE / WARP; i++) {
            lse2_delta[stage * 2 * TILE + i * WARP] = row_lse2[i];
            lse2_delta[stage * 2 * TILE + i * WARP + TILE] = row_delta[i];
            doc_begin[stage * TILE + i * WARP] = row_begin[i];
        }
        if (lane == 0) {
            const int row = tile * TILE, offset = stage * smem.Q_BYTES;
            tma_load_rows<HEAD_DIM, TILE>(smem.q + offset, qkv_map, smem.q_full[stage], head, row, work.b);
            tma_load_rows<HEAD_DIM, TILE>(smem.dout + offset, dout_map, smem.dout_full[stage], head, row,
                                          work.b);
        } else {
            arrive(smem.q_full[stage]);
        }
    };

    for (unsigned work_iter = 0;; work_iter++) {
        WorkTile& work = smem.work_tiles[work_iter % WORK_TILE_SLOTS];
        fetch_work_tile<HEAD_DIM>(work, tile_counter, start, batch, length, heads, kv_heads);
        const unsigned first_step = step;
        for (int head = work.head_begin; head < work.head_end; head++)
            for (int tile = work.first_query_tile; tile < work.first_query_tile + work.query_tiles;
                 tile++, step++) {
                load_query_tile(work, head, tile);
                if (step > first_step) continue;
                // K and V follow the first q, never precede it: consumers still issue an unused S^T with this
                // q before they release the previous K and V (D = 128). The other stage belonged to the
                // previous work tile's last step. Once all consumers release it, they have seen kv_full[1],
                // and nobody reads the previous V or the other ds buffer any more.
                wait_empty(step + 1);
                wait(smem.kv_empty[0], work_iter % 2 ^ 1);
                if (lane == 0) {
                    const int k_head = heads + work.kv_head;
                    tma_load_rows<HEAD_DIM, KEY_TILE>(buffers.kv, qkv_map, smem.kv_full[0], k_head,
                                                      work.first_key, work.b);
                    tma_load_rows<HEAD_DIM, KEY_TILE>(buffers.kv + smem.K_BYTES, qkv_map, smem.kv_full[1],
                                                      k_head + kv_heads, work.first_key, work.b);
                }
                __syncwarp();  // lane 0 has issued the loads; the warp goes on converged
            }
        if (step == first_step) {  // no work left
            // The consumers' last step has issued one more S^T.
            // It multiplies the stale stage, and nobody uses it.
            wait_empty(step);
            arrive(smem.q_full[step % STAGES]);
            wait(smem.kv_empty[0], work_iter % 2 ^ 1);
            if (lane == 0) arrive(smem.kv_full[0]);
            return;
        }
        if ((step - first_step) % 2) buffers.next_step();
        buffers.next_work_tile();
    }
}

// Waits for K, and with it the work tile. The slot stays
// valid at least until this warp releases the next K/V.
template <int HEAD_DIM>
const WorkTile& wait_work_tile(const SmemLayout<HEAD_DIM>& smem, unsigned work_iter) {
    wait(smem.kv_full[0], work_iter % 2);
    return smem.work_tiles[work_iter % WORK_TILE_SLOTS];
}

// Warp: arrives at kv_empty. At D = 128 the producer may then overwrite K and V. At D = 64 buffers rotate,
// and the arrival only says that the warp has seen kv_full's phase, so that the next phase may complete.
template <int HEAD_DIM>
void arrive_kv_empty(const SmemLayout<HEAD_DIM>& smem) {
    __syncwarp();  // all lanes have seen kv_full's phase, so the next phase may complete
    if (threadIdx.x % WARP == 0) arrive(smem.kv_empty[0]);
}
