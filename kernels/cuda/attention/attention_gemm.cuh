// The two kinds of product of the mma.sync attention kernels. T is bf16, or fp32 that is rounded
// to tf32 when an operand is loaded into registers. attention_tile.cuh describes the tiles.
//
// gemm_nt: acc = A B^T, of a warp's resident rows and the streamed rows. It computes S and dP.
//
// gemm_nn: acc += A B, of a gemm_nt's accumulators and the streamed rows. It computes out, dq, dk and dv.
//
// Accumulators have mma.cuh's layout. acc[i][j][e] is in row 16 i + g (+ 8 for e >= 2) and column
// 8 j + 2 t (+ 1 for odd e). gemm_nn of fp32 orders its columns otherwise, see gemm_nn_tf32.
#pragma once

#include "attention_tile.cuh"

// Warp: ldmatrix_x4 of an operand. fp32 is rounded to tf32.
template <typename T>
void load_operand(unsigned (&value)[4], unsigned row) {
    ldmatrix_x4(value, row);
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int m = 0; m < 4; m++) value[m] = to_tf32(__uint_as_float(value[m]));
    }
}

// A warp's resident rows as A operands: held in registers, or read from shared memory at each use.
template <typename T, int HEAD_DIM, int ROW_TILES, bool IN_REGISTERS>
struct WarpRows {
    unsigned address;
    unsigned frags[IN_REGISTERS ? ROW_TILES : 1][IN_REGISTERS ? K_STEPS<T, HEAD_DIM> : 1][4];

    // `tile`: address of the warp's first row, plus lane_offset. The tile must be complete.
    WarpRows(unsigned tile) : address(tile) {
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                for (int k = 0; k < K_STEPS<T, HEAD_DIM>; k++) load_operand<T>(frags[i][k], address_of(i, k));
        }
    }

    unsigned address_of(int i, int k) const {
        return address + i * 16 * STRIDE<T, HEAD_DIM> + k * 2 * CHUNK_BYTES;
    }

    // The A fragment of rows 16 i .. 16 i + 15 and the columns of step k.
    void fragment(unsigned (&a)[4], int i, int k) const {
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int e = 0; e < 4; e++) a[e] = frags[i][k][e];
        } else {
            load_operand<T>(a, address_of(i, k));
        }
    }
};

// acc = rows streamed^T. `streamed`: address of the tile's first row, plus lane_offset.
template <typename T, int HEAD_DIM, int ROW_TILES, int COUNT, bool IN_REGISTERS>
void gemm_nt(float (&acc)[ROW_TILES][COUNT / 8][4],
             const WarpRows<T, HEAD_DIM, ROW_TILES, IN_REGISTERS>& rows, unsigned streamed) {
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int j = 0; j < COUNT / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[i][j][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < K_STEPS<T, HEAD_DIM>; k++) {
        unsigned a[ROW_TILES][4];
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) rows.fragment(a[i], i, k);
#pragma unroll
        for (int j = 0; j < COUNT / 16; j++) {
            unsigned b[4];
            load_operand<T>(b, streamed + j * 16 * STRIDE<T, HEAD_DIM> + k * 2 * CHUNK_BYTES);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
                if constexpr (sizeof(T) == 2) {
                    mma_bf16(acc[i][2 * j], a[i], b[0], b[2]);
                    mma_bf16(acc[i][2 * j + 1], a[i], b[1], b[3]);
                } else {
                    mma_tf32(acc[i][2 * j], a[i], b[0], b[2]);
                    mma_tf32(acc[i][2 * j + 1], a[i], b[1], b[3]);
                }
            }
        }
    }
}

// acc += weight streamed. `weight`: accumulators of a gemm_nt, rounded to bf16 here. `streamed`: address of
// the tile's first row, plus lane_offset_nn.
template <int HEAD_DIM, int ROW_TILES, int TILES>
void gemm_nn_bf16(float (&acc)[ROW_TILES][HEAD_DIM / 8][4], const float (&weight)[ROW_TILES][TILES][4],
                  unsigned streamed) {
#pragma unroll
    for (int k = 0; k < TILES / 2; k++) {
        unsigned a[ROW_TILES][4];
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                // Columns 8 to 15 of the A fragment come from the second accumulator tile.
                const float (&c)[4] = weight[i][2 * k + e / 2];
                a[i][e] = pack(c[e % 2 * 2], c[e % 2 * 2 + 1]);
            }
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 16; j++) {
            unsigned b[4];
            ldmatrix_x4_trans(b, streamed + k * 16 * STRIDE<bf16, HEAD_DIM> + j * 32);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
                mma_bf16(acc[i][2 * j], a[i], b[0], b[1]);
                mma_bf16(acc[i][2 * j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// gemm_nn with `weight` rounded to tf32. Two orders differ from bf16's. They avoid
// shuffles and allow 16-byte loads. The MMA's K indices t and t + 4 are the rows 2t and
// 2t + 1, which the lane holds in `weight`. Its column g of acc[i][4 s + q] is the
// column 32 s + 4 g + q. So acc[i][j][e] is column 32 (j / 4) + 8 t + 4 (e odd) + j % 4.
template <int HEAD_DIM, int ROW_TILES, int TILES>
void gemm_nn_tf32(float (&acc)[ROW_TILES][HEAD_DIM / 8][4], const float (&weight)[ROW_TILES][TILES][4],
                  unsigned streamed) {
#pragma unroll
    for (int k = 0; k < TILES; k++) {
        unsigned a[ROW_TILES][4];
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) a[i][e] = to_tf32(weight[i][k][e % 2 * 2 + e / 2]);
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 32; s++) {
            // 8 lanes at a time read 128 bytes. Rows are 4 banks apart.
            unsigned even[4], odd[4];
            ld_shared_v4(even, streamed + k * 8 * STRIDE<float, HEAD_DIM> + s * 128);
            ld_shared_v4(odd, streamed + (k * 8 + 1) * STRIDE<float, HEAD_DIM> + s * 128);
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const unsigned b0 = to_tf32(__uint_as_float(even[q])), b1 = to_tf32(__uint_as_float(odd[q]));
#pragma unroll
                for (int i = 0; i < ROW_TILES; i++) mma_tf32(acc[i][4 * s + q], a[i], b0, b1);
            }
        }
    }
}

template <typename T, int HEAD_DIM, int ROW_TILES, int TILES>
void gemm_nn(float (&acc)[ROW_TILES][HEAD_DIM / 8][4], const float (&weight)[ROW_TILES][TILES][4],
             unsigned streamed) {
    if constexpr (sizeof(T) == 2) gemm_nn_bf16<HEAD_DIM, ROW_TILES>(acc, weight, streamed);
    else gemm_nn_tf32<HEAD_DIM, ROW_TILES>(acc, weight, streamed);
}
