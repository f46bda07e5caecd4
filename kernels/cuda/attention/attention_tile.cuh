// What the mma.sync attention kernels share: tiles of rows of HEAD_DIM elements in shared memory, masks and
// stores. attention_gemm.cuh has the products. T is bf16 or fp32.
//
// A block has a resident tile of rows (of q; or of k and v), 16 * ROW_TILES
// rows a warp. Tiles of the other side are streamed through shared memory.
#pragma once

#include "mma.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr float LOG2_E = 1.4426950408889634f;

inline float minus_infinity() { return __int_as_float(0xff800000); }

// A chunk is the 16 bytes of one cp.async. CHUNK: its elements. An MMA's K extent is two chunks.
constexpr int CHUNK_BYTES = 16;
template <typename T>
constexpr int CHUNK = CHUNK_BYTES / sizeof(T);
template <typename T, int HEAD_DIM>
constexpr int ROW_BYTES = HEAD_DIM * sizeof(T);
template <typename T, int HEAD_DIM>
constexpr int K_STEPS = ROW_BYTES<T, HEAD_DIM> / (2 * CHUNK_BYTES);

// Bytes between rows: padded by one chunk to an odd number of chunks.
// The 8 rows that ldmatrix reads at a time then lie in different banks.
template <typename T, int HEAD_DIM>
constexpr int STRIDE = ROW_BYTES<T, HEAD_DIM> + CHUNK_BYTES;

// Rows of a streamed tile. Fewer if a row is long: two stages and the
// resident tile must fit into 99 KB, the shared memory of sm_86 and sm_89.
template <typename T, int HEAD_DIM>
constexpr int STREAMED_ROWS = ROW_BYTES<T, HEAD_DIM> <= 128 ? 64 : (ROW_BYTES<T, HEAD_DIM> <= 256 ? 32 : 16);

// Stages of streamed tiles in the backward pass, which has two resident tiles.
template <typename T, int HEAD_DIM>
constexpr int BACKWARD_STAGES = ROW_BYTES<T, HEAD_DIM> <= 384 ? 2 : 1;

// For __launch_bounds__: 3 blocks leave 168 registers per thread, 2 leave 255. Not tuned.
template <int HEAD_DIM, int ROW_TILES>
constexpr int MIN_BLOCKS_PER_SM = HEAD_DIM <= 64 && ROW_TILES == 1 ? 3 : 2;

// The lane's offset for an ldmatrix_x4 of 16 rows and two chunks.
// Matrices: rows 0 to 7, rows 8 to 15, then both of the second chunk.
template <typename T, int HEAD_DIM>
unsigned lane_offset() {
    const unsigned lane = threadIdx.x % WARP;
    return lane % 16 * STRIDE<T, HEAD_DIM> + lane / 16 * CHUNK_BYTES;
}

// The lane's offset for gemm_nn's streamed operand. With fp32 the lane reads chunk g of rows 2t and 2t + 1.
template <typename T, int HEAD_DIM>
unsigned lane_offset_nn() {
    const unsigned lane = threadIdx.x % WARP;
    return sizeof(T) == 2 ? lane_offset<T, HEAD_DIM>()
                          : lane % 4 * 2 * STRIDE<T, HEAD_DIM> + lane / 4 * CHUNK_BYTES;
}

// Block: issues cp.async of ROWS rows, `row_stride` elements
// apart. Rows from `rows` on are filled with zeros.
template <typename T, int HEAD_DIM, int ROWS>
void cp_async_tile(unsigned tile, const T* source, int row_stride, int rows) {
    constexpr int LANES = HEAD_DIM / CHUNK<T> % 8 ? 4 : 8;  // that copy a row
    constexpr int PASS = THREADS / LANES;                   // rows at a time
    constexpr int BYTES = sizeof(T);
    static_assert(ROWS % PASS == 0, "each thread copies the same number of chunks");
    const int row = threadIdx.x / LANES, d = threadIdx.x % LANES * CHUNK<T>;
    tile += row * STRIDE<T, HEAD_DIM> + d * BYTES;
    source += row * row_stride + d;  // ROWS * row_stride stays far below 2^31
#pragma unroll
    for (int n = 0; n < ROWS; n += PASS)
#pragma unroll
        for (int c = 0; c < HEAD_DIM; c += LANES * CHUNK<T>)
            cp_async(tile + n * STRIDE<T, HEAD_DIM> + c * BYTES, source + (n * row_stride + c),
                     row + n < rows);
}

// Causal and document mask of S (queries x keys): masked
// scores become -inf. doc_begin: start of the warp's queries.
template <int ROW_TILES, int TILES>
void apply_mask(float (&score)[ROW_TILES][TILES][4], int first_query, int first_key, const int* doc_begin) {
    const int lane = threadIdx.x % WARP, lane_key = first_key + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = i * 16 + half * 8 + lane / 4, lowest = doc_begin[row] - lane_key;
            const int highest = first_query + row - lane_key;
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++)
                    if ((j * 8 + odd < lowest) | (j * 8 + odd > highest))
                        score[i][j][2 * half + odd] = minus_infinity();
        }
}

// apply_mask of S^T (keys x queries). doc_begin: start of these queries. The first `inside` of them exist.
template <int ROW_TILES, int TILES>
void apply_mask_transposed(float (&score)[ROW_TILES][TILES][4], int first_key, int first_query,
                           const int* doc_begin, int inside) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int column = j * 8 + lane % 4 * 2 + odd, highest = first_query + column;
            const int lowest = doc_begin[column];
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int key = first_key + i * 16 + half * 8 + lane / 4;
                    if ((key < lowest) | (key > highest) | (column >= inside))
                        score[i][j][2 * half + odd] = minus_infinity();
                }
        }
}

// target[row] = acc[row] for the warp's rows below `rows`. The rows are staged
// in `tile`, shared memory that only this warp uses, for 16-byte stores.
template <int HEAD_DIM, int ROW_TILES>
void store_rows(unsigned char* tile, const float (&acc)[ROW_TILES][HEAD_DIM / 8][4], bf16* target,
                long long row_stride, int rows) {
    constexpr int CHUNKS = HEAD_DIM / CHUNK<bf16>;
    const int lane = threadIdx.x % WARP;
    __syncwarp();  // separates other lanes' reads of the tile's old content from the writes below
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++) {
            unsigned char* pair =
                tile + (i * 16 + lane / 4) * STRIDE<bf16, HEAD_DIM> + (j * 8 + lane % 4 * 2) * 2;
            *reinterpret_cast<unsigned*>(pair) = pack(acc[i][j][0], acc[i][j][1]);
            *reinterpret_cast<unsigned*>(pair + 8 * STRIDE<bf16, HEAD_DIM>) =
                pack(acc[i][j][2], acc[i][j][3]);
        }
    __syncwarp();  // separates the writes of the rows from their reads by other lanes
    for (int i = lane; i < 16 * ROW_TILES * CHUNKS; i += WARP) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        if (row < rows)
            *reinterpret_cast<Vector<bf16, CHUNK<bf16>>*>(target + row * row_stride + chunk * CHUNK<bf16>) =
                *reinterpret_cast<const Vector<bf16, CHUNK<bf16>>*>(tile + row * STRIDE<bf16, HEAD_DIM> +
                                                                    chunk * CHUNK_BYTES);
    }
}

// store_rows of fp32. A lane holds 8 adjacent columns of a row (gemm_nn_tf32), so no staging is needed.
template <int HEAD_DIM, int ROW_TILES>
void store_rows(unsigned char*, const float (&acc)[ROW_TILES][HEAD_DIM / 8][4], float* target,
                long long row_stride, int rows) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = i * 16 + half * 8 + lane / 4;
            if (row >= rows) continue;
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j += 4)
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    const int e = 2 * half + odd;
                    *reinterpret_cast<Vector<float, 4>*>(target + row * row_stride + j * 8 + lane % 4 * 8 +
                                                         odd * 4) = {acc[i][j][e], acc[i][j + 1][e],
                                                                     acc[i][j + 2][e], acc[i][j + 3][e]};
                }
        }
}
