// What the two passes of attention on Hopper share: their warpgroups, and tiles of rows of HEAD_DIM bf16 as HEAD_DIM / 64 parts,
// tiles of hopper.cuh, one after the other.
#pragma once

#include "hopper.cuh"

constexpr int GROUPS = 2;       // warpgroups that multiply
constexpr int GROUP_ROWS = 64;  // rows of a product, and of a copy
constexpr int KEYS = 128;       // rows of a tile of keys or values
constexpr float LOG2_E = 1.4426950408889634f;

inline float minus_infinity() { return __int_as_float(0xff800000); }

// Start to copy ROWS rows of a head to a tile, `full` being told. One thread.
template <int HEAD_DIM, int ROWS>
void load_rows(unsigned tile, const TensorMap& map, unsigned full, int head, int row, int b) {
    arrive_expecting(full, ROWS * HEAD_DIM * 2);
#pragma unroll
    for (int part = 0; part < HEAD_DIM / 64; part++)
#pragma unroll
        for (int i = 0; i < ROWS; i += GROUP_ROWS)
            tma_load(tile + (part * ROWS + i) * TILE_ROW_BYTES, map, full, part * 64, head, row + i, b);
}

// The reverse, of a warpgroup's rows.
template <int HEAD_DIM>
void store_rows(const TensorMap& map, unsigned tile, int head, int row, int b) {
#pragma unroll
    for (int part = 0; part < HEAD_DIM / 64; part++)
        tma_store(map, tile + part * GROUP_ROWS * TILE_ROW_BYTES, part * 64, head, row, b);
    bulk_commit();
}

// A warpgroup's sum, rounded, to a part of its tile.
inline void store_sum(unsigned tile, const float (&sum)[32]) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned fragment[4];
        round_fragment(fragment, sum, k);
        store_fragment(tile, k, fragment);
    }
}

// A warpgroup: the sums of such a part's columns, as ones times its rows, 16 columns a warp.
inline void sum_columns(float* sums, unsigned tile) {
    constexpr unsigned ONES[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};  // of bf16
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
    float sum[2][4] = {};
#pragma unroll
    for (int row = 0; row < GROUP_ROWS; row += 16) {
        unsigned rows[4];  // from where store_fragment puts columns 16 warp ..
        ldmatrix_x4_trans(rows, tile + (row + lane % 16) * TILE_ROW_BYTES + ((2 * warp + lane / 16) ^ lane % 8) * 16);
        mma_bf16(sum[0], ONES, rows[0], rows[1]);
        mma_bf16(sum[1], ONES, rows[2], rows[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)  // a product's rows are all the same
        if (lane < 4) *reinterpret_cast<float2*>(sums + 16 * warp + 8 * i + 2 * lane) = float2{sum[i][0], sum[i][1]};
}
