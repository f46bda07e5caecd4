// What the tensor-core attention kernels share: tiles of rows of HEAD_DIM bf16 in shared memory, and the two kinds of product.
//
// A warp owns 16 * ROW_TILES rows of the block's own tile and walks over the columns: rows of the other side's tile. Products of
// rows with columns have the fragments' layout of mma.cuh, sum[i][j][e]: row 16 i + g (+ 8 from e = 2 on), column 8 j + 2 t (+ 1
// where e is odd).
#pragma once

#include "mma.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int CHUNK = 8;  // bf16 of one 16-byte copy
constexpr float LOG2_E = 1.4426950408889634f;

inline float minus_infinity() { return __int_as_float(0xff800000); }

// Bytes from row to row. The padding of one chunk makes it an odd number of chunks, so that the 8 rows of a matrix that
// ldmatrix reads lie in different banks.
template <int HEAD_DIM>
constexpr int STRIDE = (HEAD_DIM + CHUNK) * 2;

// Rows of the other side's tile. Fewer where a row is long: two stages and the own tile must fit into 99 KB (sm_86, sm_89).
template <int HEAD_DIM>
constexpr int COLUMNS = HEAD_DIM <= 64 ? 64 : 32;

// Blocks a multiprocessor whose registers must fit: 168 or 255 a thread.
template <int HEAD_DIM, int ROW_TILES>
constexpr int BLOCKS = HEAD_DIM <= 64 && ROW_TILES == 1 ? 3 : 2;

// Where a lane's row begins when load_matrices reads 16 x 16 elements: rows 0.., rows 8.., then both of columns 8...
template <int HEAD_DIM>
unsigned lane_offset() {
    const unsigned lane = threadIdx.x % WARP;
    return lane % 16 * STRIDE<HEAD_DIM> + lane / 16 * CHUNK * 2;
}

// Start to copy ROWS rows, zeros from row `rows` on. All threads of the block.
template <int HEAD_DIM, int ROWS>
void copy_tile(unsigned tile, const bf16* source, int step, int rows) {
    constexpr int LANES = HEAD_DIM % 64 ? 4 : 8, PASS = THREADS / LANES;  // of a row, and rows at a time
    static_assert(ROWS % PASS == 0, "each thread copies as many chunks");
    const int row = threadIdx.x / LANES, d = threadIdx.x % LANES * CHUNK;
    tile += row * STRIDE<HEAD_DIM> + d * 2;
    source += row * step + d;  // ROWS * step stays far below 2^31
#pragma unroll
    for (int n = 0; n < ROWS; n += PASS)
#pragma unroll
        for (int c = 0; c < HEAD_DIM; c += LANES * CHUNK)
            copy_async(tile + n * STRIDE<HEAD_DIM> + c * 2, source + (n * step + c), row + n < rows);
}

// A warp's own rows as left factors: KEPT in registers, or read again each time.
template <int HEAD_DIM, int ROW_TILES, bool KEPT>
struct Rows {
    unsigned address;
    unsigned kept[KEPT ? ROW_TILES : 1][KEPT ? HEAD_DIM / 16 : 1][4];

    // `tile`: the warp's first row, plus lane_offset. The copies to it must have arrived.
    Rows(unsigned tile) : address(tile) {
        if constexpr (KEPT) {
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                for (int k = 0; k < HEAD_DIM / 16; k++)
                    load_matrices(kept[i][k], address + i * 16 * STRIDE<HEAD_DIM> + k * 32);
        }
    }

    // Rows 16 i.. and features 16 k.. as the fragment a.
    void fragment(unsigned (&a)[4], int i, int k) const {
        if constexpr (KEPT) {
#pragma unroll
            for (int e = 0; e < 4; e++) a[e] = kept[i][k][e];
        } else {
            load_matrices(a, address + i * 16 * STRIDE<HEAD_DIM> + k * 32);
        }
    }
};

// sum = rows columns^T: dot products along the features. `columns`: the tile's first row, plus lane_offset.
template <int HEAD_DIM, int ROW_TILES, int COUNT, bool KEPT>
void multiply_columns(float (&sum)[ROW_TILES][COUNT / 8][4], const Rows<HEAD_DIM, ROW_TILES, KEPT>& rows, unsigned columns) {
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int j = 0; j < COUNT / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[i][j][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        unsigned a[ROW_TILES][4];
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) rows.fragment(a[i], i, k);
#pragma unroll
        for (int j = 0; j < COUNT / 16; j++) {
            unsigned b[4];
            load_matrices(b, columns + j * 16 * STRIDE<HEAD_DIM> + k * 32);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
                multiply_add(sum[i][2 * j], a[i], b[0], b[2]);
                multiply_add(sum[i][2 * j + 1], a[i], b[1], b[3]);
            }
        }
    }
}

// sum += weight columns, weight rounded to bf16: a mean of the columns' rows. `columns` as above.
template <int HEAD_DIM, int ROW_TILES, int TILES>
void add_weighted(float (&sum)[ROW_TILES][HEAD_DIM / 8][4], const float (&weight)[ROW_TILES][TILES][4], unsigned columns) {
#pragma unroll
    for (int k = 0; k < TILES / 2; k++) {
        unsigned a[ROW_TILES][4];
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float(&c)[4] = weight[i][2 * k + e / 2];  // columns 8.. of a come from the second c
                a[i][e] = pack(c[e % 2 * 2], c[e % 2 * 2 + 1]);
            }
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 16; j++) {
            unsigned b[4];
            load_matrices_transposed(b, columns + k * 16 * STRIDE<HEAD_DIM> + j * 32);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
                multiply_add(sum[i][2 * j], a[i], b[0], b[1]);
                multiply_add(sum[i][2 * j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// Queries by keys: the scores of keys that a query does not see become -inf. `begin`: start of the warp's queries.
template <int ROW_TILES, int TILES>
void hide_unseen(float (&score)[ROW_TILES][TILES][4], int query_first, int key_first, const int* begin) {
    const int lane = threadIdx.x % WARP, lane_key = key_first + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = i * 16 + half * 8 + lane / 4, lowest = begin[row] - lane_key, highest = query_first + row - lane_key;
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++)
                    if ((j * 8 + odd < lowest) | (j * 8 + odd > highest)) score[i][j][2 * half + odd] = minus_infinity();
        }
}

// Keys by queries: the same. `begin`: start of these queries, of which `inside` are not past the end.
template <int ROW_TILES, int TILES>
void hide_unseen_transposed(float (&score)[ROW_TILES][TILES][4], int key_first, int query_first, const int* begin, int inside) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int column = j * 8 + lane % 4 * 2 + odd, highest = query_first + column, lowest = begin[column];
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int key = key_first + i * 16 + half * 8 + lane / 4;
                    if ((key < lowest) | (key > highest) | (column >= inside)) score[i][j][2 * half + odd] = minus_infinity();
                }
        }
}

// target[row] = sum[row], of the warp's rows below `rows`, by way of `tile`, rows of shared memory that only this warp still
// touches, so that a row leaves in 16-byte stores.
template <int HEAD_DIM, int ROW_TILES>
void store_rows(unsigned char* tile, const float (&sum)[ROW_TILES][HEAD_DIM / 8][4], bf16* target, long long step, int rows) {
    constexpr int CHUNKS = HEAD_DIM / CHUNK;
    const int lane = threadIdx.x % WARP;
    __syncwarp();  // other lanes have read what the tile held
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++) {
            unsigned char* pair = tile + (i * 16 + lane / 4) * STRIDE<HEAD_DIM> + (j * 8 + lane % 4 * 2) * 2;
            *reinterpret_cast<unsigned*>(pair) = pack(sum[i][j][0], sum[i][j][1]);
            *reinterpret_cast<unsigned*>(pair + 8 * STRIDE<HEAD_DIM>) = pack(sum[i][j][2], sum[i][j][3]);
        }
    __syncwarp();  // the rows, written by many lanes, are whole
    for (int i = lane; i < 16 * ROW_TILES * CHUNKS; i += WARP) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        if (row < rows)
            *reinterpret_cast<Vector<bf16, CHUNK>*>(target + row * step + chunk * CHUNK) =
                *reinterpret_cast<const Vector<bf16, CHUNK>*>(tile + row * STRIDE<HEAD_DIM> + chunk * CHUNK * 2);
    }
}
