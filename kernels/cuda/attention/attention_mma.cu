// Causal grouped-query attention with mma.sync (sm_80 and later). Head dims 32, 64, 96 and 128. T is bf16, or
// fp32 that is rounded to tf32 as an operand.
//
// The equations, the layout of the arrays and what is saved: see attention_scalar.cu.
//
// Block: 4 warps, 64 * ROW_TILES queries of one head. Key and value tiles of STREAMED_ROWS rows are double
//     buffered with cp.async. They run from the diagonal down.
// Warp: 16 * ROW_TILES of the queries, output accumulators
// in registers. p stays in registers: the accumulators
//     of S are the A operand of PV (fp32: with permuted keys).
// Masking: the block skips tiles that none of its queries attends to, a warp those that none of its own does.
//     Only tiles on a border are masked element by element.
// Precision: bf16 or tf32 operands, fp32 accumulators;
// softmax and lse in fp32. p is rounded as an operand, out
//     once. exp is 2^x with log2(e) / sqrt(D) folded into the scale.
// Determinism: every sum has a fixed order; no atomics.
// Source: Dao 2023, arXiv:2307.08691 (FlashAttention-2), algorithm 1.
// Tile sizes, blocks per SM, and which q are held IN_REGISTERS: not tuned.

#include "attention_gemm.cuh"

// Grid (query tiles, H, B), longest first. Each query attends to itself, and a
// warp's first key tile holds the own key of each of its rows: KEY_TILE is a
// multiple of WARP_ROWS. So row_max is finite from then on, and exp needs no guard.
template <typename T, int HEAD_DIM, int ROW_TILES>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM<HEAD_DIM, ROW_TILES>)
    attention_forward(T* out, float* lse, const T* qkv, const int* start, int length, int heads, int kv_heads,
                      float scale) {
    extern __shared__ __align__(16) unsigned char smem[];
    __shared__ int doc_begin[16 * ROW_TILES * WARPS];  // start of the block's queries
    constexpr int WARP_ROWS = 16 * ROW_TILES, QUERY_TILE = WARPS * WARP_ROWS;
    constexpr int KEY_TILE = STREAMED_ROWS<T, HEAD_DIM>;
    constexpr int TILE_BYTES = KEY_TILE * STRIDE<T, HEAD_DIM>;
    constexpr bool IN_REGISTERS = sizeof(T) == 4 || HEAD_DIM <= 64;
    static_assert(KEY_TILE % WARP_ROWS == 0 && QUERY_TILE <= THREADS,
                  "see above; each thread loads tile_offset most one start");
    const int first = (gridDim.x - 1 - blockIdx.x) * QUERY_TILE, end = min(first + QUERY_TILE, length);
    const int head = blockIdx.y, b = blockIdx.z;
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * WARP_ROWS;
    const int first_row = first + warp_row;
    const int row_stride = (heads + 2 * kv_heads) * HEAD_DIM;
    const long long batch_row = (long long)b * length;
    const T* keys = qkv + batch_row * row_stride + (heads + head / (heads / kv_heads)) * HEAD_DIM;
    const T* values = keys + kv_heads * HEAD_DIM;
    const unsigned query_tile = shared_address(smem);
    const unsigned key_tiles = query_tile + QUERY_TILE * STRIDE<T, HEAD_DIM>;
    const unsigned value_tiles = key_tiles + 2 * TILE_BYTES;
    const unsigned nt_offset = lane_offset<T, HEAD_DIM>();
    const unsigned nn_offset = lane_offset_nn<T, HEAD_DIM>() - nt_offset;
    const auto copy = [&](int tile) {
        const long long tile_offset = (long long)tile * KEY_TILE * row_stride;
        cp_async_tile<T, HEAD_DIM, KEY_TILE>(key_tiles + tile % 2 * TILE_BYTES, keys + tile_offset,
                                             row_stride, length - tile * KEY_TILE);
        cp_async_tile<T, HEAD_DIM, KEY_TILE>(value_tiles + tile % 2 * TILE_BYTES, values + tile_offset,
                                             row_stride, length - tile * KEY_TILE);
    };

    const int lowest = start[batch_row + first] / KEY_TILE;
    int tile = (end - 1) / KEY_TILE;
    cp_async_tile<T, HEAD_DIM, QUERY_TILE>(
        query_tile, qkv + (batch_row + first) * row_stride + head * HEAD_DIM, row_stride, length - first);
    copy(tile);
    const float scale_log2 = scale * LOG2_E;
    float row_max[ROW_TILES][2], row_sum[ROW_TILES][2], acc[ROW_TILES][HEAD_DIM / 8][4] = {};
    if (threadIdx.x < QUERY_TILE)
        doc_begin[threadIdx.x] = start[batch_row + min(first + (int)threadIdx.x, length - 1)];
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            row_max[i][half] = minus_infinity();
            row_sum[i][half] = 0.0f;
        }
    cp_async_wait_all();
    __syncthreads();  // separates the writes of q, doc_begin and the first k and v tiles from their reads
    const WarpRows<T, HEAD_DIM, ROW_TILES, IN_REGISTERS> queries(query_tile + warp_row * STRIDE<T, HEAD_DIM> +
                                                                 nt_offset);
    for (; tile >= lowest; tile--) {
        if (tile > lowest) copy(tile - 1);
        const int first_key = tile * KEY_TILE;
        if (first_row < length && first_key < first_row + WARP_ROWS &&
            first_key + KEY_TILE > doc_begin[warp_row]) {
            float p[ROW_TILES][KEY_TILE / 8][4];
            gemm_nt<T, HEAD_DIM, ROW_TILES, KEY_TILE>(p, queries,
                                                      key_tiles + tile % 2 * TILE_BYTES + nt_offset);
            if (first_key + KEY_TILE - 1 > first_row || first_key < doc_begin[warp_row + WARP_ROWS - 1])
                apply_mask(p, first_row, first_key, doc_begin + warp_row);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float new_max = row_max[i][half];
#pragma unroll
                    for (int j = 0; j < KEY_TILE / 8; j++)
                        new_max = fmaxf(new_max, fmaxf(p[i][j][2 * half], p[i][j][2 * half + 1]));
                    // A row is spread over 4 lanes. The branch above is warp-uniform.
                    new_max = fmaxf(new_max, __shfl_xor_sync(ALL_LANES, new_max, 1));
                    new_max = fmaxf(new_max, __shfl_xor_sync(ALL_LANES, new_max, 2));
                    const float rescale = exp2_approx((row_max[i][half] - new_max) * scale_log2);
                    const float scaled_max = new_max * scale_log2;
                    row_max[i][half] = new_max;
                    row_sum[i][half] *= rescale;
#pragma unroll
                    for (int j = 0; j < KEY_TILE / 8; j++)
#pragma unroll
                        for (int e = 2 * half; e < 2 * half + 2; e++) {
                            p[i][j][e] = exp2_approx(p[i][j][e] * scale_log2 - scaled_max);
                            row_sum[i][half] += p[i][j][e];
                        }
#pragma unroll
                    for (int j = 0; j < HEAD_DIM / 8; j++)
#pragma unroll
                        for (int e = 2 * half; e < 2 * half + 2; e++) acc[i][j][e] *= rescale;
                }
            gemm_nn<T, HEAD_DIM, ROW_TILES>(acc, p,
                                            value_tiles + tile % 2 * TILE_BYTES + nt_offset + nn_offset);
        }
        cp_async_wait_all();
        // Separates the copies of the next tile from its reads,
        // and all reads of this tile from the next copies.
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = row_sum[i][half];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);  // over the row's 4 lanes, as above
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            const float inverse_sum = 1.0f / sum;
            const int query = first_row + i * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && query < length)
                lse[((long long)b * heads + head) * length + query] = row_max[i][half] * scale + logf(sum);
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) acc[i][j][e] *= inverse_sum;
        }
    T* target = out + ((batch_row + first_row) * heads + head) * HEAD_DIM;
    store_rows<HEAD_DIM, ROW_TILES>(smem + warp_row * STRIDE<T, HEAD_DIM>, acc, target, heads * HEAD_DIM,
                                    length - first_row);
}
