// What the forward and the backward kernel for Hopper share: warpgroup sizes,
// and tiles of rows of HEAD_DIM bf16. Such a tile is HEAD_DIM / 64 swizzled
// tiles of 64 columns (hopper.cuh), one after the other, called its d tiles.
#pragma once

#include "hopper.cuh"

constexpr int CONSUMERS = 2;        // warpgroups that issue wgmma
constexpr int WARPGROUP_ROWS = 64;  // rows of a wgmma, and of a TMA box
constexpr int KEY_TILE = 128;       // rows of a tile of k or v; not tuned
constexpr float LOG2_E = 1.4426950408889634f;

inline float minus_infinity() { return __int_as_float(0xff800000); }

// Issues the loads of ROWS rows of a head into a tile; their bytes count at the mbarrier `full`. One thread.
template <int HEAD_DIM, int ROWS>
void tma_load_rows(unsigned tile, const TensorMap& map, unsigned full, int head, int row, int b) {
    arrive_expecting(full, ROWS * HEAD_DIM * 2);
#pragma unroll
    for (int d_tile = 0; d_tile < HEAD_DIM / 64; d_tile++)
#pragma unroll
        for (int i = 0; i < ROWS; i += WARPGROUP_ROWS)
            tma_load(tile + (d_tile * ROWS + i) * TILE_ROW_BYTES, map, full, d_tile * 64, head, row + i, b);
}

// Issues and commits the stores of a warpgroup's rows. One thread.
template <int HEAD_DIM>
void tma_store_rows(const TensorMap& map, unsigned tile, int head, int row, int b) {
#pragma unroll
    for (int d_tile = 0; d_tile < HEAD_DIM / 64; d_tile++)
        tma_store(map, tile + d_tile * WARPGROUP_ROWS * TILE_ROW_BYTES, d_tile * 64, head, row, b);
    bulk_commit();
}

// Warpgroup: rounds a 64 x 64 accumulator to bf16 and stores it to a d tile.
inline void store_accumulator(unsigned d_tile, const float (&acc)[32]) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned fragment[4];
        round_fragment(fragment, acc, k);
        store_fragment(d_tile, k, fragment);
    }
}

// Warpgroup: column sums of a d tile's 64 rows, as a matrix
// of ones times the tile. Each warp sums 16 columns.
inline void sum_columns(float* sums, unsigned d_tile) {
    constexpr unsigned ONES[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};  // pairs of bf16
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
    float acc[2][4] = {};
#pragma unroll
    for (int row = 0; row < WARPGROUP_ROWS; row += 16) {
        unsigned b[4];  // columns 16 * warp and following, swizzled as store_fragment wrote them
        ldmatrix_x4_trans(
            b, d_tile + (row + lane % 16) * TILE_ROW_BYTES + ((2 * warp + lane / 16) ^ lane % 8) * 16);
        mma_bf16(acc[0], ONES, b[0], b[1]);
        mma_bf16(acc[1], ONES, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)  // all rows of acc are equal; lanes 0 to 3 hold row 0
        if (lane < 4)
            *reinterpret_cast<float2*>(sums + 16 * warp + 8 * i + 2 * lane) = float2{acc[i][0], acc[i][1]};
}
