// Causal grouped-query attention on tensor cores (sm_80 and later), head dims that are a multiple of 32 up to 128. T is bf16,
// or fp32, whose factors are rounded to tf32.
//
// The mathematics, the layout of the arrays and what is saved are attention_scalar.cu's. What differs:
//
// Work: a block of 4 warps owns 64 * ROW_TILES queries of one head, a warp 16 * ROW_TILES of them, with their sums in its
//       registers. Keys and values come in tiles of COLUMNS rows, the next one being copied while this one is used. p stays in
//       registers: as the result of one product it lies as the next one's left factor must (fp32: but for the order of keys).
// Skipped: besides the tiles that no query of the block sees, those that no query of the warp sees; only tiles on a border are
//       masked element by element.
// Precision: products of bf16 or tf32 with fp32 sums; softmax and lse fp32; p is rounded as a factor, out as it is stored. exp
//       is 2^x with log2(e) / sqrt(D) folded into the scale.
// Determinism: every sum has a fixed order; no atomics.
// Source: Dao 2023, arXiv:2307.08691 (FlashAttention-2), algorithm 1.
//
// Numbers of rows, tiles and blocks, and which queries are KEPT in registers: not tuned.

#include "attention_tile.cuh"

// Grid (query tiles, H, B), the tiles with most keys first. Tiles of keys from the diagonal down: the first tile that a warp
// takes holds the own key of each of its rows, for COLUMNS is a multiple of a warp's rows, so the largest score is finite from
// then on and exp needs no guard.
template <typename T, int HEAD_DIM, int ROW_TILES>
__global__ void __launch_bounds__(THREADS, BLOCKS<HEAD_DIM, ROW_TILES>)
    attention_forward(T* out, float* lse, const T* qkv, const int* start, int length, int heads, int kv_heads,
                      float scale) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ int begin[16 * ROW_TILES * WARPS];  // start of each query
    constexpr int OWN = 16 * ROW_TILES, QUERIES = WARPS * OWN, KEYS = COLUMNS<T, HEAD_DIM>;
    constexpr int TILE_BYTES = KEYS * STRIDE<T, HEAD_DIM>;
    constexpr bool KEPT = sizeof(T) == 4 || HEAD_DIM <= 64;
    static_assert(KEYS % OWN == 0 && QUERIES <= THREADS, "see above; a thread loads a start");
    const int first = (gridDim.x - 1 - blockIdx.x) * QUERIES, end = min(first + QUERIES, length);
    const int head = blockIdx.y, b = blockIdx.z;
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * OWN, warp_first = first + own;
    const int step = (heads + 2 * kv_heads) * HEAD_DIM;
    const long long row = (long long)b * length;
    const T* keys = qkv + row * step + (heads + head / (heads / kv_heads)) * HEAD_DIM;
    const T* values = keys + kv_heads * HEAD_DIM;
    const unsigned query_tile = shared_address(memory), key_tiles = query_tile + QUERIES * STRIDE<T, HEAD_DIM>;
    const unsigned value_tiles = key_tiles + 2 * TILE_BYTES;
    const unsigned offset = lane_offset<T, HEAD_DIM>(), down = lane_offset_down<T, HEAD_DIM>() - offset;
    const auto copy = [&](int tile) {
        const long long at = (long long)tile * KEYS * step;
        copy_tile<T, HEAD_DIM, KEYS>(key_tiles + tile % 2 * TILE_BYTES, keys + at, step, length - tile * KEYS);
        copy_tile<T, HEAD_DIM, KEYS>(value_tiles + tile % 2 * TILE_BYTES, values + at, step, length - tile * KEYS);
    };

    const int lowest = start[row + first] / KEYS;
    int tile = (end - 1) / KEYS;
    copy_tile<T, HEAD_DIM, QUERIES>(query_tile, qkv + (row + first) * step + head * HEAD_DIM, step, length - first);
    copy(tile);
    const float scale2 = scale * LOG2_E;
    float largest[ROW_TILES][2], total[ROW_TILES][2], mean[ROW_TILES][HEAD_DIM / 8][4] = {};
    if (threadIdx.x < QUERIES) begin[threadIdx.x] = start[row + min(first + (int)threadIdx.x, length - 1)];
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[i][half] = minus_infinity();
            total[i][half] = 0.0f;
        }
    cp_async_wait_all();
    __syncthreads();  // the queries with their starts, and the first tile, are there
    const Rows<T, HEAD_DIM, ROW_TILES, KEPT> queries(query_tile + own * STRIDE<T, HEAD_DIM> + offset);
    for (; tile >= lowest; tile--) {
        if (tile > lowest) copy(tile - 1);
        const int key_first = tile * KEYS;
        if (warp_first < length && key_first < warp_first + OWN && key_first + KEYS > begin[own]) {
            float p[ROW_TILES][KEYS / 8][4];
            multiply_columns<T, HEAD_DIM, ROW_TILES, KEYS>(p, queries, key_tiles + tile % 2 * TILE_BYTES + offset);
            if (key_first + KEYS - 1 > warp_first || key_first < begin[own + OWN - 1])
                hide_unseen(p, warp_first, key_first, begin + own);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float raised = largest[i][half];
#pragma unroll
                    for (int j = 0; j < KEYS / 8; j++) raised = fmaxf(raised, fmaxf(p[i][j][2 * half], p[i][j][2 * half + 1]));
                    raised = fmaxf(raised, __shfl_xor_sync(ALL_LANES, raised, 1));  // a row is spread over 4 lanes; all are here,
                    raised = fmaxf(raised, __shfl_xor_sync(ALL_LANES, raised, 2));  // the warp branches as one
                    const float kept = exp2_approx((largest[i][half] - raised) * scale2), shift = raised * scale2;
                    largest[i][half] = raised;
                    total[i][half] *= kept;
#pragma unroll
                    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                        for (int e = 2 * half; e < 2 * half + 2; e++) {
                            p[i][j][e] = exp2_approx(p[i][j][e] * scale2 - shift);
                            total[i][half] += p[i][j][e];
                        }
#pragma unroll
                    for (int j = 0; j < HEAD_DIM / 8; j++)
#pragma unroll
                        for (int e = 2 * half; e < 2 * half + 2; e++) mean[i][j][e] *= kept;
                }
            add_weighted<T, HEAD_DIM, ROW_TILES>(mean, p, value_tiles + tile % 2 * TILE_BYTES + offset + down);
        }
        cp_async_wait_all();
        __syncthreads();  // the next tile is there, and all have read this one, whose place the tile after that takes
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = total[i][half];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);  // the row's 4 lanes, as above
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            const float share = 1.0f / sum;
            const int query = warp_first + i * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && query < length)
                lse[((long long)b * heads + head) * length + query] = largest[i][half] * scale + logf(sum);
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) mean[i][j][e] *= share;
        }
    T* target = out + ((row + warp_first) * heads + head) * HEAD_DIM;
    store_rows<HEAD_DIM, ROW_TILES>(memory + own * STRIDE<T, HEAD_DIM>, mean, target, heads * HEAD_DIM, length - warp_first);
}
