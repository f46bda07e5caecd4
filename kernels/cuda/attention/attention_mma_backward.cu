// Backward pass of attention_mma.cu: one kernel for dq, and one for dk and dv.
//
// The equations and the layout of the arrays: see attention_scalar.cu. p is recomputed from lse.
//
// Block: 4 warps, 64 * ROW_TILES rows of one head: queries, or keys with all query heads that share them.
//     Tiles of STREAMED_ROWS rows of the other side are streamed. They are double buffered, except if
//     BACKWARD_STAGES is 1.
// Warp: 16 * ROW_TILES of the rows, gradient accumulators in registers. It multiplies SUBTILE streamed rows
//     at a time. p and ds stay in registers: the accumulators of one product are the next one's A operand.
//     So the key kernel computes S^T (keys x queries).
// Masking: the block skips tiles that none of its rows takes part in, a warp such subtiles. Only subtiles
//     on a border are masked element by element.
// Precision: bf16 or tf32 operands, fp32 accumulators; exp, lse and delta in fp32. p and ds are rounded as
//     operands; dq, dk and dv once. exp is 2^x with log2(e) folded into the scale.
// Determinism: every sum has a fixed order; no atomics. Its price: S and dP are computed twice, 7 matmuls
//     instead of 5.
// Source: Dao 2023, arXiv:2307.08691 (FlashAttention-2), algorithm 2, with a kernel of its own for dq.
// Tile sizes, subtiles and blocks per SM: not tuned.

#include "attention_gemm.cuh"

// Grid (query tiles, H, B), longest first. SUBTILE: keys whose s and ds are in registers at a time.
template <typename T, int HEAD_DIM, int ROW_TILES, int SUBTILE, bool IN_REGISTERS>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM<HEAD_DIM, ROW_TILES>)
    attention_backward_query(T* dqkv, const float* delta, const T* dout, const float* lse, const T* qkv,
                             const int* start, int length, int heads, int kv_heads, float scale) {
    extern __shared__ __align__(16) unsigned char smem[];
    __shared__ int doc_begin[16 * ROW_TILES * WARPS];  // start of the block's queries
    constexpr int WARP_ROWS = 16 * ROW_TILES, QUERY_TILE = WARPS * WARP_ROWS;
    constexpr int KEY_TILE = STREAMED_ROWS<T, HEAD_DIM>;
    constexpr int TILE_BYTES = KEY_TILE * STRIDE<T, HEAD_DIM>, STAGES = BACKWARD_STAGES<T, HEAD_DIM>;
    static_assert(QUERY_TILE <= THREADS, "each thread loads tile_offset most one start");
    const int first = (gridDim.x - 1 - blockIdx.x) * QUERY_TILE, end = min(first + QUERY_TILE, length);
    const int head = blockIdx.y, b = blockIdx.z;
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * WARP_ROWS;
    const int first_row = first + warp_row;
    const int row_stride = (heads + 2 * kv_heads) * HEAD_DIM;
    const long long batch_row = (long long)b * length;
    const T* keys = qkv + batch_row * row_stride + (heads + head / (heads / kv_heads)) * HEAD_DIM;
    const T* values = keys + kv_heads * HEAD_DIM;
    const unsigned query_tile = shared_address(smem);
    const unsigned dout_tile = query_tile + QUERY_TILE * STRIDE<T, HEAD_DIM>;
    const unsigned key_tiles = dout_tile + QUERY_TILE * STRIDE<T, HEAD_DIM>;
    const unsigned value_tiles = key_tiles + STAGES * TILE_BYTES;
    const unsigned nt_offset = lane_offset<T, HEAD_DIM>();
    const unsigned nn_offset = lane_offset_nn<T, HEAD_DIM>() - nt_offset;
    const auto copy = [&](int tile) {
        const long long tile_offset = (long long)tile * KEY_TILE * row_stride;
        cp_async_tile<T, HEAD_DIM, KEY_TILE>(key_tiles + tile % STAGES * TILE_BYTES, keys + tile_offset,
                                             row_stride, length - tile * KEY_TILE);
        cp_async_tile<T, HEAD_DIM, KEY_TILE>(value_tiles + tile % STAGES * TILE_BYTES, values + tile_offset,
                                             row_stride, length - tile * KEY_TILE);
    };

    const int last = (end - 1) / KEY_TILE;
    int tile = start[batch_row + first] / KEY_TILE;
    cp_async_tile<T, HEAD_DIM, QUERY_TILE>(
        query_tile, qkv + (batch_row + first) * row_stride + head * HEAD_DIM, row_stride, length - first);
    cp_async_tile<T, HEAD_DIM, QUERY_TILE>(dout_tile, dout + ((batch_row + first) * heads + head) * HEAD_DIM,
                                           heads * HEAD_DIM, length - first);
    copy(tile);
    const float scale_log2 = scale * LOG2_E;
    float row_lse2[ROW_TILES][2], row_delta[ROW_TILES][2], dq[ROW_TILES][HEAD_DIM / 8][4] = {};
    if (threadIdx.x < QUERY_TILE)
        doc_begin[threadIdx.x] = start[batch_row + min(first + (int)threadIdx.x, length - 1)];
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int query = min(first_row + i * 16 + half * 8 + lane / 4, length - 1);
            const long long index = ((long long)b * heads + head) * length + query;
            row_lse2[i][half] = lse[index] * LOG2_E;
            row_delta[i][half] = delta[index];
        }
    cp_async_wait_all();
    __syncthreads();  // separates the writes of q, dout, doc_begin and the first tiles from their reads
    const WarpRows<T, HEAD_DIM, ROW_TILES, IN_REGISTERS> queries(query_tile + warp_row * STRIDE<T, HEAD_DIM> +
                                                                 nt_offset);
    const WarpRows<T, HEAD_DIM, ROW_TILES, IN_REGISTERS> douts(dout_tile + warp_row * STRIDE<T, HEAD_DIM> +
                                                               nt_offset);
    for (; tile <= last; tile++) {
        if (STAGES == 2 && tile < last) copy(tile + 1);
#pragma unroll 1
        for (int subtile = 0; subtile < KEY_TILE; subtile += SUBTILE) {
            const int first_key = tile * KEY_TILE + subtile;
            if (first_row >= length || first_key >= first_row + WARP_ROWS ||
                first_key + SUBTILE <= doc_begin[warp_row])
                continue;
            const unsigned tile_offset =
                tile % STAGES * TILE_BYTES + subtile * STRIDE<T, HEAD_DIM> + nt_offset;
            float s[ROW_TILES][SUBTILE / 8][4], dp[ROW_TILES][SUBTILE / 8][4];
            gemm_nt<T, HEAD_DIM, ROW_TILES, SUBTILE>(s, queries, key_tiles + tile_offset);
            gemm_nt<T, HEAD_DIM, ROW_TILES, SUBTILE>(dp, douts, value_tiles + tile_offset);
            if (first_key + SUBTILE - 1 > first_row || first_key < doc_begin[warp_row + WARP_ROWS - 1])
                apply_mask(s, first_row, first_key, doc_begin + warp_row);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                for (int j = 0; j < SUBTILE / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float p = exp2_approx(s[i][j][e] * scale_log2 - row_lse2[i][e / 2]);
                        s[i][j][e] = p * (dp[i][j][e] - row_delta[i][e / 2]);
                    }
            gemm_nn<T, HEAD_DIM, ROW_TILES>(dq, s, key_tiles + tile_offset + nn_offset);
        }
        cp_async_wait_all();
        // Separates the copies of the next tile from its reads,
        // and all reads of this tile from the next copies.
        __syncthreads();
        if (STAGES == 1 && tile < last) {
            copy(tile + 1);
            cp_async_wait_all();
            __syncthreads();  // separates the copies of the next tile from its reads
        }
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) dq[i][j][e] *= scale;
    T* target = dqkv + (batch_row + first_row) * row_stride + head * HEAD_DIM;
    store_rows<HEAD_DIM, ROW_TILES>(smem + warp_row * STRIDE<T, HEAD_DIM>, dq, target, row_stride,
                                    length - first_row);
}

// Grid (key tiles, KV, B): rising key tiles are longest first.
// SUBTILE: queries whose p and ds are in registers at a time.
template <typename T, int HEAD_DIM, int ROW_TILES, int SUBTILE, bool IN_REGISTERS>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? 2 : MIN_BLOCKS_PER_SM<HEAD_DIM, ROW_TILES>)
    attention_backward_key(T* dqkv, const float* delta, const T* dout, const float* lse, const T* qkv,
                           const int* start, int length, int heads, int kv_heads, float scale) {
    extern __shared__ __align__(16) unsigned char smem[];
    constexpr int WARP_ROWS = 16 * ROW_TILES, KEY_TILE = WARPS * WARP_ROWS;
    constexpr int QUERY_TILE = STREAMED_ROWS<T, HEAD_DIM>;
    constexpr int TILE_BYTES = QUERY_TILE * STRIDE<T, HEAD_DIM>, STAGES = BACKWARD_STAGES<T, HEAD_DIM>;
    static_assert(KEY_TILE % QUERY_TILE == 0, "the first tile of queries begins with the first key");
    const int first = blockIdx.x * KEY_TILE, kv_head = blockIdx.y, b = blockIdx.z;
    const int end = min(first + KEY_TILE, length);
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * WARP_ROWS;
    const int first_row = first + warp_row, group = heads / kv_heads;
    const int row_stride = (heads + 2 * kv_heads) * HEAD_DIM;
    const long long batch_row = (long long)b * length;
    const long long key_row = (batch_row + first) * row_stride + (heads + kv_head) * HEAD_DIM;
    const long long value_row = key_row + kv_heads * HEAD_DIM;
    const unsigned key_tile = shared_address(smem), value_tile = key_tile + KEY_TILE * STRIDE<T, HEAD_DIM>;
    const unsigned query_tiles = value_tile + KEY_TILE * STRIDE<T, HEAD_DIM>;
    const unsigned dout_tiles = query_tiles + STAGES * TILE_BYTES;
    const unsigned nt_offset = lane_offset<T, HEAD_DIM>();
    const unsigned nn_offset = lane_offset_nn<T, HEAD_DIM>() - nt_offset;
    // Per query of a streamed tile and per stage: lse, delta, start.
    unsigned char* column_data = smem + 2 * KEY_TILE * STRIDE<T, HEAD_DIM> + 2 * STAGES * TILE_BYTES;
    const float* column_lse = reinterpret_cast<float*>(column_data);
    const float* column_delta = column_lse + STAGES * QUERY_TILE;
    const int* column_doc_begin = reinterpret_cast<int*>(column_data) + 2 * STAGES * QUERY_TILE;

    cp_async_tile<T, HEAD_DIM, KEY_TILE>(key_tile, qkv + key_row, row_stride, length - first);
    cp_async_tile<T, HEAD_DIM, KEY_TILE>(value_tile, qkv + value_row, row_stride, length - first);
    // start never falls along a row. So the queries that attend to one of these
    // keys end with the last one whose document begins before the keys' end.
    int attending = 0;
    for (int t = first + threadIdx.x; t < length; t += THREADS) attending += start[batch_row + t] < end;
    const int queries_end = first + block_reduce(attending, Sum(), 0), heads_end = (kv_head + 1) * group;
    const auto copy = [&](int head, int query, int stage) {
        cp_async_tile<T, HEAD_DIM, QUERY_TILE>(query_tiles + stage * TILE_BYTES,
                                               qkv + (batch_row + query) * row_stride + head * HEAD_DIM,
                                               row_stride, length - query);
        cp_async_tile<T, HEAD_DIM, QUERY_TILE>(dout_tiles + stage * TILE_BYTES,
                                               dout + ((batch_row + query) * heads + head) * HEAD_DIM,
                                               heads * HEAD_DIM, length - query);
        if (threadIdx.x < QUERY_TILE) {
            const int t = min(query + (int)threadIdx.x, length - 1), slot = stage * QUERY_TILE + threadIdx.x;
            const long long index = ((long long)b * heads + head) * length + t;
            cp_async_4(shared_address(column_lse + slot), lse + index);
            cp_async_4(shared_address(column_delta + slot), delta + index);
            cp_async_4(shared_address(column_doc_begin + slot), start + batch_row + t);
        }
    };
    int head = kv_head * group, query_tile = first, stage = 0;
    copy(head, query_tile, stage);
    const float scale_log2 = scale * LOG2_E;
    float dk[ROW_TILES][HEAD_DIM / 8][4] = {}, dv[ROW_TILES][HEAD_DIM / 8][4] = {};
    cp_async_wait_all();
    __syncthreads();  // separates the copies of k, v and the first q and dout tiles from their reads
    const WarpRows<T, HEAD_DIM, ROW_TILES, IN_REGISTERS> keys(key_tile + warp_row * STRIDE<T, HEAD_DIM> +
                                                              nt_offset);
    const WarpRows<T, HEAD_DIM, ROW_TILES, IN_REGISTERS> values(value_tile + warp_row * STRIDE<T, HEAD_DIM> +
                                                                nt_offset);
    while (head < heads_end) {
        const bool last = query_tile + QUERY_TILE >= queries_end;
        const int next_head = head + last, next_tile = last ? first : query_tile + QUERY_TILE;
        if (STAGES == 2 && next_head < heads_end) copy(next_head, next_tile, stage ^ 1);
#pragma unroll 1
        for (int subtile = 0; subtile < QUERY_TILE; subtile += SUBTILE) {
            const int first_query = query_tile + subtile, slot = stage * QUERY_TILE + subtile;
            if (first_row >= length || first_query >= length || first_query + SUBTILE <= first_row) continue;
            if (column_doc_begin[slot] >= first_row + WARP_ROWS) continue;
            const unsigned tile_offset = stage * TILE_BYTES + subtile * STRIDE<T, HEAD_DIM> + nt_offset;
            float p[ROW_TILES][SUBTILE / 8][4], ds[ROW_TILES][SUBTILE / 8][4];
            gemm_nt<T, HEAD_DIM, ROW_TILES, SUBTILE>(p, keys, query_tiles + tile_offset);
            gemm_nt<T, HEAD_DIM, ROW_TILES, SUBTILE>(ds, values, dout_tiles + tile_offset);
            // Queries past the end carry the lse of the last query, so they must be masked as well.
            if (first_query < first_row + WARP_ROWS - 1 || column_doc_begin[slot + SUBTILE - 1] > first_row ||
                first_query + SUBTILE > length)
                apply_mask_transposed(p, first_row, first_query, column_doc_begin + slot,
                                      length - first_query);
#pragma unroll
            for (int j = 0; j < SUBTILE / 8; j++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    const int column = j * 8 + lane % 4 * 2 + odd;
                    const float lse2 = column_lse[slot + column] * LOG2_E;
                    const float query_delta = column_delta[slot + column];
#pragma unroll
                    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                        for (int e = odd; e < 4; e += 2) {
                            p[i][j][e] = exp2_approx(p[i][j][e] * scale_log2 - lse2);
                            ds[i][j][e] = p[i][j][e] * (ds[i][j][e] - query_delta);
                        }
                }
            gemm_nn<T, HEAD_DIM, ROW_TILES>(dv, p, dout_tiles + tile_offset + nn_offset);
            gemm_nn<T, HEAD_DIM, ROW_TILES>(dk, ds, query_tiles + tile_offset + nn_offset);
        }
        cp_async_wait_all();
        // Separates the copies of the next tile from its reads,
        // and all reads of this tile from the next copies.
        __syncthreads();
        if (STAGES == 1 && next_head < heads_end) {
            copy(next_head, next_tile, 0);
            cp_async_wait_all();
            __syncthreads();  // separates the copies of the next tile from its reads
        }
        head = next_head;
        query_tile = next_tile;
        stage ^= STAGES - 1;
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) dk[i][j][e] *= scale;
    unsigned char* staging = smem + warp_row * STRIDE<T, HEAD_DIM>;
    const int target = warp_row * row_stride;
    store_rows<HEAD_DIM, ROW_TILES>(staging, dk, dqkv + key_row + target, row_stride, length - first_row);
    store_rows<HEAD_DIM, ROW_TILES>(staging, dv, dqkv + value_row + target, row_stride, length - first_row);
}
