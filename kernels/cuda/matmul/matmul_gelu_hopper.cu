// A linear layer's matmul fused with GELU or with GELU's gradient, in bf16, for Hopper (wgmma, TMA).
//
//     forward     up  = a b^T (+ bias),    act = gelu(up)              a (m, k) activations, b (n, k) weights
//     backward    dup = (a b) gelu'(up),   dbias = column sums of dup  a (m, k) gradients, b (k, n) weights
//
// Layout: row-major; up, act and dup (m, n). 64 divides n and k. bias (n,) bf16. partial fp32,
//         (4 ceil(m / TILE_M), n): column sums of dup, a row per warp and row tile. sum_rows.cu adds them up.
// Work: cluster: two blocks with neighbouring column tiles. Each loads half of the a tile and multicasts it.
//       block: persistent, one per SM. Each cluster strides over output tiles, row-major.
//       warpgroups 0 and 1 (consumers): ping-pong. They compute alternate TILE_M x TILE_N tiles from one
//       queue of STAGES stages. One runs its epilogue while the other runs its main loop.
//       warpgroup 2: one producer thread issues the TMA loads of a and b.
// Precision: bf16 operands, fp32 accumulation. up and dup are rounded once. act is GELU of the unrounded up,
//            and dbias sums the unrounded dup.
// Determinism: each element is summed over k in order, each column over rows in a fixed order; no atomics.
// Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2 (GELU, tanh form); Shah et al. 2024,
//         arXiv:2407.08608, section 3.1 (ping-pong); PTX ISA, "Asynchronous warpgroup level matrix
//         instructions".
// Design: docs/kernels/gelu_matmul.md.

#include "matmul_gelu_hopper.cuh"

// Producer thread: loads a and b of all of the block's tiles, STAGES steps of TILE_K ahead.
template <bool BACKWARD, int TILE_N>
void load_operands(const SharedMemory<TILE_N>& smem, const TensorMap& a_map, const TensorMap& b_map,
                   Tiles<TILE_N> tiles, int k) {
    const int rank = cluster_rank();
    unsigned step = 0;  // counts over all tiles
    while (tiles.advance())
        for (int k_offset = 0; k_offset < k; k_offset += TILE_K, step++) {
            const unsigned stage = step % smem.STAGES, full = smem.full[stage];
            const unsigned a_boxes = smem.operands + stage * smem.STAGE_BYTES;
            wait(smem.empty[stage], step / smem.STAGES % 2 ^ 1);
            arrive_expecting(full, smem.STAGE_BYTES);
            // One of the two boxes of a, to both blocks. The other box comes from the other block.
            tma_load_multicast((1 << CLUSTER) - 1, a_boxes + rank * BOX_BYTES, a_map, full, k_offset, 0,
                               tiles.row + rank * BOX, 0);
#pragma unroll
            for (int n_tile = 0; n_tile < smem.N_TILES; n_tile++) {
                const int column = tiles.column + n_tile * BOX;
                tma_load(a_boxes + (M_TILES + n_tile) * BOX_BYTES, b_map, full,
                         BACKWARD ? column : k_offset, 0, BACKWARD ? k_offset : column, 0);
            }
        }
}

// Apply f(value, e) to accumulator elements 8 i + e, e = 0 .. 7: two column pairs of two rows each.
template <int COUNT, typename F>
void transform(float (&acc)[COUNT], int i, F f) {
#pragma unroll
    for (int e = 0; e < 8; e++) acc[8 * i + e] = f(acc[8 * i + e], e);
}

inline float unpack_bf16(unsigned pair, int odd) {
    return __uint_as_float(odd ? pair & 0xffff0000u : pair << 16);
}

// Forward epilogue of a warpgroup: stores up and act of a tile, one box of each at a time. Two pairs of
// epilogue buffers alternate, so the stores of one pair overlap the arithmetic of the next.
template <int TILE_N>
void gelu_epilogue(float (&acc)[M_TILES][TILE_N / 2], unsigned buffers, const TensorMap& up_map,
                   const TensorMap& act_map, const bf16* bias, const Tiles<TILE_N>& tiles, int n) {
    const int warpgroup = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
#pragma unroll
    for (int box = 0; box < M_TILES * TILE_N / BOX; box++) {
        const int m_tile = box % M_TILES, n_tile = box / M_TILES, column = tiles.column + n_tile * BOX;
        const unsigned up = buffers + box % 2 * 2 * BOX_BYTES, act = up + BOX_BYTES;
        unsigned bias_pairs[8] = {};  // of the lane's columns
        if (bias && column < n)
#pragma unroll
            for (int j = 0; j < 8; j++)
                bias_pairs[j] =
                    *reinterpret_cast<const unsigned*>(bias + column + j * 8 + threadIdx.x % 4 * 2);
        if (thread == 0) bulk_wait_read<1>();
        // WAR: thread 0's stores have read the buffers that all threads overwrite below.
        named_barrier_sync(WARPGROUP_BARRIER + warpgroup, WARPGROUP);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int i = n_tile * 4 + k;
            unsigned fragment[4];
            transform(acc[m_tile], i,
                      [&](float x, int e) { return x + unpack_bf16(bias_pairs[2 * k + e / 4], e % 2); });
            round_fragment(fragment, acc[m_tile], i);
            store_fragment(up, k, fragment);
            transform(acc[m_tile], i, [&](float x, int) { return x * sigmoid_of_cubic(x); });
            round_fragment(fragment, acc[m_tile], i);
            store_fragment(act, k, fragment);
        }
        fence_async_proxy();
        // RAW: thread 0's stores read what all threads wrote above.
        named_barrier_sync(WARPGROUP_BARRIER + warpgroup, WARPGROUP);
        if (thread == 0) {
            tma_store(up_map, up, column, 0, tiles.row + m_tile * BOX, 0);
            tma_store(act_map, act, column, 0, tiles.row + m_tile * BOX, 0);
            bulk_commit();
        }
    }
}

// One reduce-scatter step of a warp butterfly. Of its 2 COUNT sums a lane keeps COUNT; lane ^ DISTANCE
// keeps the others.
template <int COUNT, int DISTANCE, int ALL>
void reduce_scatter(float (&sum)[ALL]) {
    const bool upper = threadIdx.x & DISTANCE;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float received = __shfl_xor_sync(ALL_LANES, upper ? sum[i] : sum[i + COUNT], DISTANCE);
        sum[i] = (upper ? sum[i + COUNT] : sum[i]) + received;
    }
}

// Stores the column sums over a warp's 32 rows of a tile. `partial`: the warp's row, at the tile's first
// column. `columns`: columns of the array from there on.
template <int TILE_N>
void store_column_sums(const float (&acc)[M_TILES][TILE_N / 2], float* partial, int columns) {
    const int lane = threadIdx.x % WARP;
    float sum[TILE_N / 4];  // elements 2 j and 2 j + 1: columns 8 j + 2 t and 8 j + 2 t + 1, t = lane % 4
#pragma unroll
    for (int i = 0; i < TILE_N / 4; i++) {
        const int e = i / 2 * 4 + i % 2;
        sum[i] = (acc[0][e] + acc[0][e + 2]) + (acc[1][e] + acc[1][e + 2]);
    }
    reduce_scatter<TILE_N / 8, 16>(sum);
    reduce_scatter<TILE_N / 16, 8>(sum);
    reduce_scatter<TILE_N / 32, 4>(sum);
    // The first j of those that the lane has kept.
    const int first_j =
        lane / 16 * (TILE_N / 16) + lane / 8 % 2 * (TILE_N / 32) + lane / 4 % 2 * (TILE_N / 64);
#pragma unroll
    for (int i = 0; i < TILE_N / 64; i++) {
        const int column = (first_j + i) * 8 + lane % 4 * 2;
        if (column < columns) *reinterpret_cast<float2*>(partial + column) = {sum[2 * i], sum[2 * i + 1]};
    }
}

// One thread: issues the load of box `box` of the tile's up. `load_index` counts the warpgroup's loads; the
// epilogue buffers are a ring.
template <int TILE_N>
void load_up(const SharedMemory<TILE_N>& smem, const TensorMap& up_map, const Tiles<TILE_N>& tiles, int box,
             unsigned load_index) {
    const unsigned buffer = threadIdx.x / WARPGROUP * EPILOGUE_BUFFERS + load_index % EPILOGUE_BUFFERS;
    arrive_expecting(smem.up_full[buffer], BOX_BYTES);
    tma_load(smem.epilogue + buffer * BOX_BYTES, up_map, smem.up_full[buffer],
             tiles.column + box / M_TILES * BOX, 0, tiles.row + box % M_TILES * BOX, 0);
}

// Backward epilogue of a warpgroup: stores dup of a tile, one box at a time. dup overwrites up in its buffer.
// `load_index`: number of up boxes of the warpgroup's earlier tiles.
template <int TILE_N>
void gelu_backward_epilogue(float (&acc)[M_TILES][TILE_N / 2], const SharedMemory<TILE_N>& smem,
                            const TensorMap& up_map, const TensorMap& dup_map, const Tiles<TILE_N>& tiles,
                            unsigned load_index) {
    constexpr int BOXES = M_TILES * TILE_N / BOX;
    const int warpgroup = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
    const int lane = threadIdx.x % WARP, row = thread / WARP * 16 + lane % 16;
#pragma unroll
    for (int box = 0; box < BOXES; box++, load_index++) {
        const int m_tile = box % M_TILES, n_tile = box / M_TILES;
        const unsigned buffer = warpgroup * EPILOGUE_BUFFERS + load_index % EPILOGUE_BUFFERS;
        const unsigned tile = smem.epilogue + buffer * BOX_BYTES;
        wait(smem.up_full[buffer], load_index / EPILOGUE_BUFFERS % 2);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            unsigned fragment[4];
            ldmatrix_x4(fragment, tile + row * TILE_ROW_BYTES + ((2 * k + lane / 16) ^ lane % 8) * 16);
            transform(acc[m_tile], n_tile * 4 + k,
                      [&](float d, int e) { return d * gelu_slope(unpack_bf16(fragment[e / 2], e % 2)); });
            round_fragment(fragment, acc[m_tile], n_tile * 4 + k);
            store_fragment(tile, k, fragment);
        }
        fence_async_proxy();
        // RAW: thread 0's store reads what all threads wrote above.
        named_barrier_sync(WARPGROUP_BARRIER + warpgroup, WARPGROUP);
        if (thread == 0) {
            tma_store(dup_map, tile, tiles.column + n_tile * BOX, 0, tiles.row + m_tile * BOX, 0);
            bulk_commit();
            if (box > 0 && box - 1 + EPILOGUE_BUFFERS < BOXES) {
                bulk_wait_read<1>();  // the previous box's store has read its buffer
                load_up(smem, up_map, tiles, box - 1 + EPILOGUE_BUFFERS, load_index - 1 + EPILOGUE_BUFFERS);
            }
        }
    }
}

// Consumer warpgroup: computes every CONSUMERS-th of the block's tiles.
template <bool BACKWARD, int TILE_N>
void consume(const SharedMemory<TILE_N>& smem, const TensorMap& up_map, const TensorMap& out_map,
             const bf16* bias, float* partial, Tiles<TILE_N> tiles, int m, int n, int k) {
    constexpr int STAGES = SharedMemory<TILE_N>::STAGES;
    const int warpgroup = warp_number() * WARP / WARPGROUP, thread = threadIdx.x % WARPGROUP;
    const int lane = threadIdx.x % WARP;
    // From step order_step on, the other warpgroup may start its next tile. Let in earlier, its first wait
    // could meet a stage's full barrier two phases back, where the parity is the same, and return too soon
    // (docs/kernels/gelu_matmul.md).
    const int steps = k / TILE_K, order_step = max(steps - STAGES, 0);
    constexpr int B_K16_BYTES = BACKWARD ? 16 * TILE_ROW_BYTES : 32;  // 16 terms further in b
    float acc[M_TILES][TILE_N / 2] = {};
    unsigned step = 0;      // counts over all of the block's tiles
    unsigned up_loads = 0;  // boxes of up of this warpgroup's earlier tiles
    const auto release = [&](unsigned step) {
        if (lane < CLUSTER) arrive_remote(smem.empty[step % STAGES], lane);
    };
    for (int tile = 0; tiles.advance(); tile++) {
        if (tile % CONSUMERS != warpgroup) {
            step += steps;
            continue;
        }
        if (BACKWARD && thread == 0) {
            bulk_wait_read();  // WAR: the stores of the last tile have read the epilogue buffers
#pragma unroll
            for (int box = 0; box < EPILOGUE_BUFFERS; box++)
                load_up(smem, up_map, tiles, box, up_loads + box);
        }
        // Ping-pong: the other warpgroup has reached order_step of the previous tile.
        if (tile > 0) named_barrier_sync(ORDER_BARRIER + warpgroup, CONSUMERS * WARPGROUP);
        for (int i = 0; i < steps; i++, step++) {
            const unsigned a_boxes = smem.operands + step % STAGES * smem.STAGE_BYTES;
            const unsigned long long a = tile_descriptor(a_boxes);
            const unsigned long long b = tile_descriptor(a_boxes + M_TILES * BOX_BYTES, BOX_BYTES);
            wait(smem.full[step % STAGES], step / STAGES % 2);
            if (i == order_step && tiles.has_next())
                named_barrier_arrive(ORDER_BARRIER + 1 - warpgroup, CONSUMERS * WARPGROUP);
            wgmma_fence();
#pragma unroll
            for (int k16 = 0; k16 < TILE_K / 16; k16++)
#pragma unroll
                for (int m_tile = 0; m_tile < M_TILES; m_tile++)
                    wgmma_ss<false, BACKWARD>(acc[m_tile], advance(a, m_tile * BOX_BYTES + k16 * 32),
                                              advance(b, k16 * B_K16_BYTES), i + k16 > 0);
            wgmma_commit();
            wgmma_wait<1>();  // the previous step's wgmmas have read their stage
            if (i > 0) release(step - 1);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int m_tile = 0; m_tile < M_TILES; m_tile++) warpgroup_fence_operand(acc[m_tile]);
        release(step - 1);
        if constexpr (BACKWARD) {
            gelu_backward_epilogue(acc, smem, up_map, out_map, tiles, up_loads);
            up_loads += M_TILES * TILE_N / BOX;
            const long long row = tiles.row / TILE_M * WARPGROUP / WARP + thread / WARP;
            if (tiles.column < n)
                store_column_sums<TILE_N>(acc, partial + row * n + tiles.column, n - tiles.column);
        } else {
            const unsigned buffers = smem.epilogue + warpgroup * EPILOGUE_BUFFERS * BOX_BYTES;
            gelu_epilogue(acc, buffers, up_map, out_map, bias, tiles, n);
        }
    }
    if (thread == 0) bulk_wait();  // the stores read this block's shared memory
}

// Grid: clusters of CLUSTER blocks, one block per SM. up_map: up, stored (forward) or loaded (backward).
// out_map: act or dup. bias: forward, may be null. partial: backward.
template <bool BACKWARD, int TILE_N>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    matmul_gelu(const __grid_constant__ TensorMap up_map, const __grid_constant__ TensorMap out_map,
                const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                const bf16* bias, float* partial, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const SharedMemory<TILE_N> smem(memory);
    if (threadIdx.x == 0) smem.init();
    sync_cluster();  // the mbarriers of both blocks are initialized
    const int producer_warp = warp_number() - CONSUMERS * WARPGROUP / WARP;
    const Tiles<TILE_N> tiles(m, n);
    if (producer_warp < 0) {
        // 2 x 128 x 240 + 128 x 24 registers are 64,512 of the SM's 65,536.
        warpgroup_reg_alloc<240>();
        consume<BACKWARD>(smem, up_map, out_map, bias, partial, tiles, m, n, k);
    } else {
        warpgroup_reg_dealloc<24>();
        if (producer_warp == 0 && threadIdx.x % WARP == 0)
            load_operands<BACKWARD>(smem, a_map, b_map, tiles, k);
    }
    __syncwarp();    // the producer warp reconverges for the aligned barrier below
    sync_cluster();  // the other block no longer writes to this block's shared memory or barriers
}
