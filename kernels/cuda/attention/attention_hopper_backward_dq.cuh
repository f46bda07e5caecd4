// The dq-writer warps of attention_hopper_backward.cu: from a warpgroup's dq tile in shared memory to dq_sum
// and dqkv. docs/kernels/attention.md describes the order in which the blocks add.
#pragma once

#include "attention_hopper_backward.cuh"

// dq-writer warp of consumer `warpgroup`: adds the warpgroup's dq tiles to
// dq_sum in the order of the semaphore. The last contributor of a tile writes
// dqkv. Without `ordered`, only a tile's first and last contributor are fixed.
template <int HEAD_DIM>
void dq_writer(const SmemLayout<HEAD_DIM>& smem, int warpgroup, const unsigned char* smem_base, bf16* dqkv,
               float* dq_sum, int* dq_semaphore, float* partial, const int* start, int length, int heads,
               int kv_heads, bool ordered, float scale) {
    constexpr int TILE = QUERY_TILE<HEAD_DIM>, BYTES = SmemLayout<HEAD_DIM>::DQ_BYTES;
    // Lanes that write column sums, 4 per row of partial. At D = 64 warpgroup w fills row w. At D = 128 a
    // warp has its 64 columns alone and must fill both rows: even lane / 4 sums to row 0, odd to row 1.
    constexpr int WRITER_LANES = HEAD_DIM == 64 ? 4 : 8;
    const int lane = threadIdx.x % WARP, tiles = (length + TILE - 1) / TILE;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM;
    const int first_row = HEAD_DIM == 64 ? warpgroup * 64 : 0;
    const int first_column = HEAD_DIM == 64 ? 0 : warpgroup * 64;
    const float4* dq_frag =
        reinterpret_cast<const float4*>(smem_base + (smem.dq - smem.kv) + warpgroup * BYTES) + lane;
    const float4* prev_frag =
        reinterpret_cast<const float4*>(smem_base + (smem.dq_prev - smem.kv) + warpgroup * BYTES) + lane;
    unsigned step = 0, prev_loads = 0;  // over all work tiles
    for (unsigned work_iter = 0;; work_iter++) {
        const WorkTile& work = wait_work_tile(smem, work_iter);
        arrive_kv_empty(smem);
        if (work.query_tiles == 0) return;
        for (int head = work.head_begin; head < work.head_end; head++) {
            const int column = head * HEAD_DIM + first_column + lane % 4 * 2;
            float column_sums[16] = {};  // of the lane's columns, over the rows that it stores
            for (int tile = work.first_query_tile; tile < work.first_query_tile + work.query_tiles;
                 tile++, step++) {
                const long long index =
                    (((long long)work.b * heads + head) * tiles + tile) * CONSUMERS + warpgroup;
                float* dq_tile = dq_sum + index * DQ_TILE;
                // Key tiles between this one and the tile's diagonal, which contribute before.
                const int predecessors = (tile * TILE - work.first_key) / KEY_TILE;
                const bool is_last = start[(long long)work.b * length + tile * TILE] >= work.first_key;
                if (predecessors > 0) {
                    const int required = ordered || is_last ? predecessors : 1;
                    // All lanes poll, so that the warp stays converged. It sleeps in between to leave memory
                    // bandwidth to the blocks that it waits for.
                    while (__any_sync(ALL_LANES, load_acquire(dq_semaphore + index) < required))
                        __nanosleep(POLL_NS);
                    fence_async_proxy_global();  // orders the following bulk copies after the acquire
                    if (is_last && lane == 0) {
                        arrive_expecting(smem.dq_prev_full[warpgroup], BYTES);
                        bulk_load(smem.dq_prev + warpgroup * BYTES, dq_tile, BYTES,
                                  smem.dq_prev_full[warpgroup]);
                    }
                }
                wait(smem.dq_full[warpgroup], step % 2);
                // All lanes have seen the phase. Once lane 0 releases dq, the next phase may complete.
                __syncwarp();
                if (!is_last) {
                    if (lane == 0) {
                        if (predecessors > 0) bulk_reduce_add(dq_tile, smem.dq + warpgroup * BYTES, BYTES);
                        else bulk_store(dq_tile, smem.dq + warpgroup * BYTES, BYTES);
                        bulk_commit();
                        bulk_wait_read();
                        arrive(smem.dq_empty[warpgroup]);
                        bulk_wait();
                        fence_async_proxy_global();  // orders the release after the completed bulk copy
                        add_release(dq_semaphore + index);
                    }
                    __syncwarp();  // the other lanes would poll for the next tile and slow lane 0 down
                    continue;
                }
                if (predecessors > 0) wait(smem.dq_prev_full[warpgroup], prev_loads++ % 2);
                const int query = tile * TILE + first_row + lane / 4;
                bf16* target = dqkv + ((long long)work.b * length + query) * width + column;
#pragma unroll 1
                for (int warp = 0; warp < WARPGROUP / WARP;
                     warp++)  // the consumer warp whose fragments are read
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        float4 value = dq_frag[j * WARPGROUP + warp * WARP];
                        if (predecessors > 0) {
                            const float4 prev = prev_frag[j * WARPGROUP + warp * WARP];
                            value = {prev.x + value.x, prev.y + value.y, prev.z + value.z, prev.w + value.w};
                        }
                        column_sums[2 * j] += value.x + value.z;  // dq is 0 past the end: p is
                        column_sums[2 * j + 1] += value.y + value.w;
                        const int row = query + warp * 16;
                        unsigned* pair =
                            reinterpret_cast<unsigned*>(target + (long long)warp * 16 * width + j * 8);
                        if (row < length) *pair = pack(value.x * scale, value.y * scale);
                        if (row + 8 < length) pair[4 * width] = pack(value.z * scale, value.w * scale);
                    }
                __syncwarp();  // all lanes have read dq
                if (lane == 0) arrive(smem.dq_empty[warpgroup]);
            }
            if (!partial) continue;
            const int row = HEAD_DIM == 64 ? warpgroup : lane / 4 % CONSUMERS;
            float* to = work.partial_row(partial, row, length, width) + column;
#pragma unroll
            for (int i = 0; i < 16; i++) {
#pragma unroll
                for (int offset = WARP / 2; offset >= WRITER_LANES; offset /= 2)
                    column_sums[i] += __shfl_xor_sync(ALL_LANES, column_sums[i], offset);
                if (lane < WRITER_LANES) to[i / 2 * 8 + i % 2] = column_sums[i] * scale;
            }
        }
    }
}
