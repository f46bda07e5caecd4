// What the tensor-core attention kernels share: tiles of rows of HEAD_DIM elements in shared memory, and the two kinds of
// product. T is bf16, or fp32, whose factors are rounded to tf32 as they are loaded into registers.
//
// A warp owns 16 * ROW_TILES rows of the block's own tile and walks over the columns: rows of the other side's tile. Products of
// rows with columns have the fragments' layout of mma.cuh, sum[i][j][e]: row 16 i + g (+ 8 from e = 2 on), column 8 j + 2 t (+ 1
// where e is odd). Weighted sums of fp32 have another order of columns, see add_weighted_tf32.
#pragma once

#include "mma.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr float LOG2_E = 1.4426950408889634f;

inline float minus_infinity() { return __int_as_float(0xff800000); }

// Bytes of one copy, elements of it, bytes of a row, and features of one product, two chunks.
constexpr int CHUNK_BYTES = 16;
template <typename T>
constexpr int CHUNK = CHUNK_BYTES / sizeof(T);
template <typename T, int HEAD_DIM>
constexpr int ROW_BYTES = HEAD_DIM * sizeof(T);
template <typename T, int HEAD_DIM>
constexpr int STEPS = ROW_BYTES<T, HEAD_DIM> / (2 * CHUNK_BYTES);

// Bytes from row to row. The padding of one chunk makes it an odd number of chunks, so that the 8 rows of a matrix that
// ldmatrix reads lie in different banks.
template <typename T, int HEAD_DIM>
constexpr int STRIDE = ROW_BYTES<T, HEAD_DIM> + CHUNK_BYTES;

// Rows of the other side's tile. Fewer where a row is long: two stages and the own tile must fit into 99 KB (sm_86, sm_89).
template <typename T, int HEAD_DIM>
constexpr int COLUMNS = ROW_BYTES<T, HEAD_DIM> <= 128 ? 64 : ROW_BYTES<T, HEAD_DIM> <= 256 ? 32 : 16;

// Stages of these tiles in the backward pass, which has two own tiles.
template <typename T, int HEAD_DIM>
constexpr int BACKWARD_STAGES = ROW_BYTES<T, HEAD_DIM> <= 384 ? 2 : 1;

// Blocks a multiprocessor whose registers must fit: 168 or 255 a thread.
template <int HEAD_DIM, int ROW_TILES>
constexpr int BLOCKS = HEAD_DIM <= 64 && ROW_TILES == 1 ? 3 : 2;

// Where a lane's row begins when ldmatrix_x4 reads 16 rows of two chunks: rows 0.., rows 8.., then both of the second chunk.
template <typename T, int HEAD_DIM>
unsigned lane_offset() {
    const unsigned lane = threadIdx.x % WARP;
    return lane % 16 * STRIDE<T, HEAD_DIM> + lane / 16 * CHUNK_BYTES;
}

// The same for add_weighted, which of fp32 reads chunk g of row 2t and of the next.
template <typename T, int HEAD_DIM>
unsigned lane_offset_down() {
    const unsigned lane = threadIdx.x % WARP;
    return sizeof(T) == 2 ? lane_offset<T, HEAD_DIM>() : lane % 4 * 2 * STRIDE<T, HEAD_DIM> + lane / 4 * CHUNK_BYTES;
}

// Start to copy ROWS rows, zeros from row `rows` on. All threads of the block.
template <typename T, int HEAD_DIM, int ROWS>
void copy_tile(unsigned tile, const T* source, int step, int rows) {
    constexpr int LANES = HEAD_DIM / CHUNK<T> % 8 ? 4 : 8, PASS = THREADS / LANES;  // of a row, and rows at a time
    constexpr int BYTES = sizeof(T);
    static_assert(ROWS % PASS == 0, "each thread copies as many chunks");
    const int row = threadIdx.x / LANES, d = threadIdx.x % LANES * CHUNK<T>;
    tile += row * STRIDE<T, HEAD_DIM> + d * BYTES;
    source += row * step + d;  // ROWS * step stays far below 2^31
#pragma unroll
    for (int n = 0; n < ROWS; n += PASS)
#pragma unroll
        for (int c = 0; c < HEAD_DIM; c += LANES * CHUNK<T>)
            cp_async(tile + n * STRIDE<T, HEAD_DIM> + c * BYTES, source + (n * step + c), row + n < rows);
}

// Warp: ldmatrix_x4 of factors, fp32 rounded to tf32.
template <typename T>
void load_factors(unsigned (&value)[4], unsigned row) {
    ldmatrix_x4(value, row);
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int m = 0; m < 4; m++) value[m] = to_tf32(__uint_as_float(value[m]));
    }
}

// A warp's own rows as left factors: KEPT in registers, or read again each time.
template <typename T, int HEAD_DIM, int ROW_TILES, bool KEPT>
struct Rows {
    unsigned address;
    unsigned kept[KEPT ? ROW_TILES : 1][KEPT ? STEPS<T, HEAD_DIM> : 1][4];

    // `tile`: the warp's first row, plus lane_offset. The copies to it must have arrived.
    Rows(unsigned tile) : address(tile) {
        if constexpr (KEPT) {
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                for (int k = 0; k < STEPS<T, HEAD_DIM>; k++) load_factors<T>(kept[i][k], at(i, k));
        }
    }

    unsigned at(int i, int k) const { return address + i * 16 * STRIDE<T, HEAD_DIM> + k * 2 * CHUNK_BYTES; }

    // Rows 16 i.. and the features of step k as the fragment a.
    void fragment(unsigned (&a)[4], int i, int k) const {
        if constexpr (KEPT) {
#pragma unroll
            for (int e = 0; e < 4; e++) a[e] = kept[i][k][e];
        } else {
            load_factors<T>(a, at(i, k));
        }
    }
};

// sum = rows columns^T: dot products along the features. `columns`: the tile's first row, plus lane_offset.
template <typename T, int HEAD_DIM, int ROW_TILES, int COUNT, bool KEPT>
void multiply_columns(float (&sum)[ROW_TILES][COUNT / 8][4], const Rows<T, HEAD_DIM, ROW_TILES, KEPT>& rows, unsigned columns) {
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int j = 0; j < COUNT / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[i][j][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < STEPS<T, HEAD_DIM>; k++) {
        unsigned a[ROW_TILES][4];
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) rows.fragment(a[i], i, k);
#pragma unroll
        for (int j = 0; j < COUNT / 16; j++) {
            unsigned b[4];
            load_factors<T>(b, columns + j * 16 * STRIDE<T, HEAD_DIM> + k * 2 * CHUNK_BYTES);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
                if constexpr (sizeof(T) == 2) {
                    mma_bf16(sum[i][2 * j], a[i], b[0], b[2]);
                    mma_bf16(sum[i][2 * j + 1], a[i], b[1], b[3]);
                } else {
                    mma_tf32(sum[i][2 * j], a[i], b[0], b[2]);
                    mma_tf32(sum[i][2 * j + 1], a[i], b[1], b[3]);
                }
            }
        }
    }
}

// sum += weight columns, weight rounded to bf16: a mean of the columns' rows. `columns`: with lane_offset_down.
template <int HEAD_DIM, int ROW_TILES, int TILES>
void add_weighted_bf16(float (&sum)[ROW_TILES][HEAD_DIM / 8][4], const float (&weight)[ROW_TILES][TILES][4], unsigned columns) {
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
            ldmatrix_x4_trans(b, columns + k * 16 * STRIDE<bf16, HEAD_DIM> + j * 32);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
                mma_bf16(sum[i][2 * j], a[i], b[0], b[1]);
                mma_bf16(sum[i][2 * j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// The same, weight rounded to tf32. Two orders differ from bf16's, so that nothing must cross lanes and loads take 16 bytes:
// a product's terms t and t + 4 are the rows 2t and 2t + 1, which is where the weights' lanes hold them; and its column g of
// sum[i][4 s + q] is the feature 32 s + 4 g + q, so sum[i][j][e] is feature 32 (j / 4) + 8 t + 4 (e odd) + j % 4.
template <int HEAD_DIM, int ROW_TILES, int TILES>
void add_weighted_tf32(float (&sum)[ROW_TILES][HEAD_DIM / 8][4], const float (&weight)[ROW_TILES][TILES][4], unsigned columns) {
#pragma unroll
    for (int k = 0; k < TILES; k++) {
        unsigned a[ROW_TILES][4];
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) a[i][e] = to_tf32(weight[i][k][e % 2 * 2 + e / 2]);
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 32; s++) {
            unsigned even[4], odd[4];  // 8 lanes at a time read 128 bytes: a row lies 4 banks after the row before
            ld_shared_v4(even, columns + k * 8 * STRIDE<float, HEAD_DIM> + s * 128);
            ld_shared_v4(odd, columns + (k * 8 + 1) * STRIDE<float, HEAD_DIM> + s * 128);
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const unsigned b0 = to_tf32(__uint_as_float(even[q])), b1 = to_tf32(__uint_as_float(odd[q]));
#pragma unroll
                for (int i = 0; i < ROW_TILES; i++) mma_tf32(sum[i][4 * s + q], a[i], b0, b1);
            }
        }
    }
}

template <typename T, int HEAD_DIM, int ROW_TILES, int TILES>
void add_weighted(float (&sum)[ROW_TILES][HEAD_DIM / 8][4], const float (&weight)[ROW_TILES][TILES][4], unsigned columns) {
    if constexpr (sizeof(T) == 2) add_weighted_bf16<HEAD_DIM, ROW_TILES>(sum, weight, columns);
    else add_weighted_tf32<HEAD_DIM, ROW_TILES>(sum, weight, columns);
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
    constexpr int CHUNKS = HEAD_DIM / CHUNK<bf16>;
    const int lane = threadIdx.x % WARP;
    __syncwarp();  // other lanes have read what the tile held
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++) {
            unsigned char* pair = tile + (i * 16 + lane / 4) * STRIDE<bf16, HEAD_DIM> + (j * 8 + lane % 4 * 2) * 2;
            *reinterpret_cast<unsigned*>(pair) = pack(sum[i][j][0], sum[i][j][1]);
            *reinterpret_cast<unsigned*>(pair + 8 * STRIDE<bf16, HEAD_DIM>) = pack(sum[i][j][2], sum[i][j][3]);
        }
    __syncwarp();  // the rows, written by many lanes, are whole
    for (int i = lane; i < 16 * ROW_TILES * CHUNKS; i += WARP) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        if (row < rows)
            *reinterpret_cast<Vector<bf16, CHUNK<bf16>>*>(target + row * step + chunk * CHUNK<bf16>) =
                *reinterpret_cast<const Vector<bf16, CHUNK<bf16>>*>(tile + row * STRIDE<bf16, HEAD_DIM> + chunk * CHUNK_BYTES);
    }
}

// The same of fp32, whose weighted sums lie 8 features of a row to a lane, so that no tile is needed.
template <int HEAD_DIM, int ROW_TILES>
void store_rows(unsigned char*, const float (&sum)[ROW_TILES][HEAD_DIM / 8][4], float* target, long long step, int rows) {
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
                    *reinterpret_cast<Vector<float, 4>*>(target + row * step + j * 8 + lane % 4 * 8 + odd * 4) = {
                        sum[i][j][e], sum[i][j + 1][e], sum[i][j + 2][e], sum[i][j + 3][e]};
                }
        }
}
