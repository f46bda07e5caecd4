// Gradient of attention_mma.cu, the probabilities computed again from lse.
//
// The mathematics and the layout of the arrays are attention_scalar.cu's. Two kernels: dq sums over keys, dk and dv over queries.
//
// Work: a block of 4 warps owns 64 * ROW_TILES rows of one head (queries; or keys, and then all query heads that share them), a
//       warp 16 * ROW_TILES of them, with their sums in its registers. The other side comes in tiles of COLUMNS rows, the next
//       one being copied while this one is used (not where BACKWARD_STAGES is 1), and of those UNIT at a time are multiplied.
//       p and ds stay in registers: as the result of one product they lie as the next one's left factor must. The key kernel
//       therefore computes s transposed, keys by queries.
// Skipped: besides the tiles that no row of the block takes part in, the units that no row of the warp does; only units on a
//       border are masked element by element.
// Precision: products of bf16, or of fp32 rounded to tf32, with fp32 sums; exp, lse and delta fp32; p and ds are rounded as
//       factors, dq, dk and dv as they are stored. exp is 2^x with log2(e) folded into the scale.
// Determinism: every sum has a fixed order; no atomics. Price: s and dout . v twice, 7 products instead of 5.
// Source: Dao 2023, arXiv:2307.08691 (FlashAttention-2), algorithm 2, with dq in a kernel of its own.
//
// Numbers of rows, tiles, units and blocks: not tuned.

#include "attention_tile.cuh"

// Grid (query tiles, H, B), the tiles with most keys first. UNIT: keys whose s and ds are in registers at a time.
template <typename T, int HEAD_DIM, int ROW_TILES, int UNIT, bool KEPT>
__global__ void __launch_bounds__(THREADS, BLOCKS<HEAD_DIM, ROW_TILES>)
    attention_backward_query(T* dqkv, const float* delta, const T* dout, const float* lse, const T* qkv,
                             const int* start, int length, int heads, int kv_heads, float scale) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ int begin[16 * ROW_TILES * WARPS];  // start of each query
    constexpr int OWN = 16 * ROW_TILES, QUERIES = WARPS * OWN, KEYS = COLUMNS<T, HEAD_DIM>;
    constexpr int TILE_BYTES = KEYS * STRIDE<T, HEAD_DIM>, STAGES = BACKWARD_STAGES<T, HEAD_DIM>;
    static_assert(QUERIES <= THREADS, "a thread loads a start");
    const int first = (gridDim.x - 1 - blockIdx.x) * QUERIES, end = min(first + QUERIES, length);
    const int head = blockIdx.y, b = blockIdx.z;
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * OWN, warp_first = first + own;
    const int step = (heads + 2 * kv_heads) * HEAD_DIM;
    const long long row = (long long)b * length;
    const T* keys = qkv + row * step + (heads + head / (heads / kv_heads)) * HEAD_DIM;
    const T* values = keys + kv_heads * HEAD_DIM;
    const unsigned query_tile = shared_address(memory), gradient_tile = query_tile + QUERIES * STRIDE<T, HEAD_DIM>;
    const unsigned key_tiles = gradient_tile + QUERIES * STRIDE<T, HEAD_DIM>, value_tiles = key_tiles + STAGES * TILE_BYTES;
    const unsigned offset = lane_offset<T, HEAD_DIM>(), down = lane_offset_down<T, HEAD_DIM>() - offset;
    const auto copy = [&](int tile) {
        const long long at = (long long)tile * KEYS * step;
        copy_tile<T, HEAD_DIM, KEYS>(key_tiles + tile % STAGES * TILE_BYTES, keys + at, step, length - tile * KEYS);
        copy_tile<T, HEAD_DIM, KEYS>(value_tiles + tile % STAGES * TILE_BYTES, values + at, step, length - tile * KEYS);
    };

    const int last = (end - 1) / KEYS;
    int tile = start[row + first] / KEYS;
    copy_tile<T, HEAD_DIM, QUERIES>(query_tile, qkv + (row + first) * step + head * HEAD_DIM, step, length - first);
    copy_tile<T, HEAD_DIM, QUERIES>(gradient_tile, dout + ((row + first) * heads + head) * HEAD_DIM, heads * HEAD_DIM,
                                 length - first);
    copy(tile);
    const float scale2 = scale * LOG2_E;
    float row_lse2[ROW_TILES][2], row_delta[ROW_TILES][2], sum[ROW_TILES][HEAD_DIM / 8][4] = {};
    if (threadIdx.x < QUERIES) begin[threadIdx.x] = start[row + min(first + (int)threadIdx.x, length - 1)];
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int query = min(warp_first + i * 16 + half * 8 + lane / 4, length - 1);
            const long long at = ((long long)b * heads + head) * length + query;
            row_lse2[i][half] = lse[at] * LOG2_E;
            row_delta[i][half] = delta[at];
        }
    cp_async_wait_all();
    __syncthreads();  // queries with their starts, gradients and the first tile are there
    const Rows<T, HEAD_DIM, ROW_TILES, KEPT> queries(query_tile + own * STRIDE<T, HEAD_DIM> + offset);
    const Rows<T, HEAD_DIM, ROW_TILES, KEPT> gradients(gradient_tile + own * STRIDE<T, HEAD_DIM> + offset);
    for (; tile <= last; tile++) {
        if (STAGES == 2 && tile < last) copy(tile + 1);
#pragma unroll 1
        for (int unit = 0; unit < KEYS; unit += UNIT) {
            const int key_first = tile * KEYS + unit;
            if (warp_first >= length || key_first >= warp_first + OWN || key_first + UNIT <= begin[own]) continue;
            const unsigned at = tile % STAGES * TILE_BYTES + unit * STRIDE<T, HEAD_DIM> + offset;
            float s[ROW_TILES][UNIT / 8][4], dp[ROW_TILES][UNIT / 8][4];
            multiply_columns<T, HEAD_DIM, ROW_TILES, UNIT>(s, queries, key_tiles + at);
            multiply_columns<T, HEAD_DIM, ROW_TILES, UNIT>(dp, gradients, value_tiles + at);
            if (key_first + UNIT - 1 > warp_first || key_first < begin[own + OWN - 1])
                hide_unseen(s, warp_first, key_first, begin + own);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                for (int j = 0; j < UNIT / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float p = exp2_approx(s[i][j][e] * scale2 - row_lse2[i][e / 2]);
                        s[i][j][e] = p * (dp[i][j][e] - row_delta[i][e / 2]);
                    }
            add_weighted<T, HEAD_DIM, ROW_TILES>(sum, s, key_tiles + at + down);
        }
        cp_async_wait_all();
        __syncthreads();  // the next tile is there, and all have read this one, whose place the tile after that takes
        if (STAGES == 1 && tile < last) {
            copy(tile + 1);
            cp_async_wait_all();
            __syncthreads();  // the next tile is there
        }
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[i][j][e] *= scale;
    T* target = dqkv + (row + warp_first) * step + head * HEAD_DIM;
    store_rows<HEAD_DIM, ROW_TILES>(memory + own * STRIDE<T, HEAD_DIM>, sum, target, step, length - warp_first);
}

// Grid (key tiles, KV, B): the tiles that most queries see come first by themselves. UNIT: queries whose p and ds are in
// registers at a time.
template <typename T, int HEAD_DIM, int ROW_TILES, int UNIT, bool KEPT>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? 2 : BLOCKS<HEAD_DIM, ROW_TILES>)
    attention_backward_key(T* dqkv, const float* delta, const T* dout, const float* lse, const T* qkv, const int* start,
                           int length, int heads, int kv_heads, float scale) {
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int OWN = 16 * ROW_TILES, KEYS = WARPS * OWN, QUERIES = COLUMNS<T, HEAD_DIM>;
    constexpr int TILE_BYTES = QUERIES * STRIDE<T, HEAD_DIM>, STAGES = BACKWARD_STAGES<T, HEAD_DIM>;
    static_assert(KEYS % QUERIES == 0, "the first tile of queries begins with the first key");
    const int first = blockIdx.x * KEYS, shared = blockIdx.y, b = blockIdx.z, end = min(first + KEYS, length);
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * OWN, warp_first = first + own, group = heads / kv_heads;
    const int step = (heads + 2 * kv_heads) * HEAD_DIM;
    const long long row = (long long)b * length;
    const long long key_row = (row + first) * step + (heads + shared) * HEAD_DIM, value_row = key_row + kv_heads * HEAD_DIM;
    const unsigned key_tile = shared_address(memory), value_tile = key_tile + KEYS * STRIDE<T, HEAD_DIM>;
    const unsigned query_tiles = value_tile + KEYS * STRIDE<T, HEAD_DIM>, gradient_tiles = query_tiles + STAGES * TILE_BYTES;
    const unsigned offset = lane_offset<T, HEAD_DIM>(), down = lane_offset_down<T, HEAD_DIM>() - offset;
    // Of each query of a tile, in each stage: lse, delta, start.
    unsigned char* columns = memory + 2 * KEYS * STRIDE<T, HEAD_DIM> + 2 * STAGES * TILE_BYTES;
    const float *column_lse = reinterpret_cast<float*>(columns), *column_delta = column_lse + STAGES * QUERIES;
    const int* column_begin = reinterpret_cast<int*>(columns) + 2 * STAGES * QUERIES;

    copy_tile<T, HEAD_DIM, KEYS>(key_tile, qkv + key_row, step, length - first);
    copy_tile<T, HEAD_DIM, KEYS>(value_tile, qkv + value_row, step, length - first);
    // start never falls, so the queries that see one of these keys are those up to the last that begins before their end.
    int seen = 0;
    for (int t = first + threadIdx.x; t < length; t += THREADS) seen += start[row + t] < end;
    const int queries_end = first + block_reduce(seen, Sum(), 0), heads_end = (shared + 1) * group;
    const auto copy = [&](int head, int query, int stage) {
        copy_tile<T, HEAD_DIM, QUERIES>(query_tiles + stage * TILE_BYTES, qkv + (row + query) * step + head * HEAD_DIM, step,
                                     length - query);
        copy_tile<T, HEAD_DIM, QUERIES>(gradient_tiles + stage * TILE_BYTES, dout + ((row + query) * heads + head) * HEAD_DIM,
                                     heads * HEAD_DIM, length - query);
        if (threadIdx.x < QUERIES) {
            const int t = min(query + (int)threadIdx.x, length - 1), slot = stage * QUERIES + threadIdx.x;
            const long long at = ((long long)b * heads + head) * length + t;
            cp_async_4(shared_address(column_lse + slot), lse + at);
            cp_async_4(shared_address(column_delta + slot), delta + at);
            cp_async_4(shared_address(column_begin + slot), start + row + t);
        }
    };
    int head = shared * group, query_tile = first, stage = 0;
    copy(head, query_tile, stage);
    const float scale2 = scale * LOG2_E;
    float dkey[ROW_TILES][HEAD_DIM / 8][4] = {}, dvalue[ROW_TILES][HEAD_DIM / 8][4] = {};
    cp_async_wait_all();
    __syncthreads();  // keys, values and the first tile are there
    const Rows<T, HEAD_DIM, ROW_TILES, KEPT> keys(key_tile + own * STRIDE<T, HEAD_DIM> + offset);
    const Rows<T, HEAD_DIM, ROW_TILES, KEPT> values(value_tile + own * STRIDE<T, HEAD_DIM> + offset);
    while (head < heads_end) {
        const bool last = query_tile + QUERIES >= queries_end;
        const int next_head = head + last, next_tile = last ? first : query_tile + QUERIES;
        if (STAGES == 2 && next_head < heads_end) copy(next_head, next_tile, stage ^ 1);
#pragma unroll 1
        for (int unit = 0; unit < QUERIES; unit += UNIT) {
            const int query_first = query_tile + unit, slot = stage * QUERIES + unit;
            if (warp_first >= length || query_first >= length || query_first + UNIT <= warp_first) continue;
            if (column_begin[slot] >= warp_first + OWN) continue;
            const unsigned at = stage * TILE_BYTES + unit * STRIDE<T, HEAD_DIM> + offset;
            float p[ROW_TILES][UNIT / 8][4], ds[ROW_TILES][UNIT / 8][4];
            multiply_columns<T, HEAD_DIM, ROW_TILES, UNIT>(p, keys, query_tiles + at);
            multiply_columns<T, HEAD_DIM, ROW_TILES, UNIT>(ds, values, gradient_tiles + at);
            // Queries past the end carry another's lse: they too must be masked.
            if (query_first < warp_first + OWN - 1 || column_begin[slot + UNIT - 1] > warp_first || query_first + UNIT > length)
                hide_unseen_transposed(p, warp_first, query_first, column_begin + slot, length - query_first);
#pragma unroll
            for (int j = 0; j < UNIT / 8; j++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    const int column = j * 8 + lane % 4 * 2 + odd;
                    const float lse2 = column_lse[slot + column] * LOG2_E, query_delta = column_delta[slot + column];
#pragma unroll
                    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                        for (int e = odd; e < 4; e += 2) {
                            p[i][j][e] = exp2_approx(p[i][j][e] * scale2 - lse2);
                            ds[i][j][e] = p[i][j][e] * (ds[i][j][e] - query_delta);
                        }
                }
            add_weighted<T, HEAD_DIM, ROW_TILES>(dvalue, p, gradient_tiles + at + down);
            add_weighted<T, HEAD_DIM, ROW_TILES>(dkey, ds, query_tiles + at + down);
        }
        cp_async_wait_all();
        __syncthreads();  // the next tile is there, and all have read this one, whose place the tile after that takes
        if (STAGES == 1 && next_head < heads_end) {
            copy(next_head, next_tile, 0);
            cp_async_wait_all();
            __syncthreads();  // the next tile is there
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
            for (int e = 0; e < 4; e++) dkey[i][j][e] *= scale;
    unsigned char* staging = memory + own * STRIDE<T, HEAD_DIM>;
    const int target = own * step;
    store_rows<HEAD_DIM, ROW_TILES>(staging, dkey, dqkv + key_row + target, step, length - warp_first);
    store_rows<HEAD_DIM, ROW_TILES>(staging, dvalue, dqkv + value_row + target, step, length - warp_first);
}
