// The sizes of decode_step.cu: how blocks and warps divide the matmuls, and the layout of shared memory.
//
//     out[r, n] = sum over k of x[r, k] w[n, k]
//
// Tile:  TILE neighbouring outputs, the B operand of one MMA. The A operand is the few rows of x and zeros.
// Step:  STEP elements of K of one tile: two MMAs, 16 bytes of weights a lane.
// Item:  one tile and a contiguous range of its steps (split-K). One warp computes one item.
// Block: tiles are assigned to blocks round-robin. Partial sums of a tile's items meet in shared memory,
//        where they are added in item order.
//
// Example: qkv of gpt2_124m has 2304 outputs of 768 inputs. On 132 SMs its 288 tiles are at most 3 a
// block. A tile has 24 steps, in 4 items of 6 steps each. So a block has 12 items, one for each warp.
#pragma once

#include "reduce.cuh"

constexpr int WARPS = 12, THREADS = WARPS * WARP;  // 16 warps were 2 % slower: kernels/NOTES.md, fifth day
constexpr int TILE = 8, PAIRS = TILE / 2, STEP = 32;
// 8 bf16 are 16 bytes, the widest load. LANES_PER_ROW lanes cover one step of one row. In mma.cuh's terms
// g = lane / LANES_PER_ROW and t = lane % LANES_PER_ROW.
constexpr int BF16_VEC = 8, LANES_PER_ROW = STEP / BF16_VEC;

// The matmuls of one layer, in order.
enum MatmulKind { QKV, PROJ, UP, DOWN, MATMULS };

constexpr int const_max(int a, int b) { return a > b ? a : b; }
constexpr int const_min(int a, int b) { return a < b ? a : b; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <int BLOCKS_, int DIM_, int HEADS_, int KV_HEADS_, int HEAD_DIM_, int FFN_, bool ROPE_,
          bool QK_NORM_, bool GATED_>
struct Model {
    static constexpr int BLOCKS = BLOCKS_, DIM = DIM_, HEADS = HEADS_, KV_HEADS = KV_HEADS_;
    static constexpr int HEAD_DIM = HEAD_DIM_, FFN = FFN_;
    static constexpr int QKV_WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
    static constexpr bool ROPE = ROPE_, QK_NORM = QK_NORM_, GATED = GATED_;
};

// Elements from one row of x or w to the next in shared memory. The stride is 64 bytes modulo 128, so the
// 16-byte loads of 8 neighbouring lanes (two rows) hit different banks.
constexpr int ROW_ALIGN = 64, ROW_PAD = 32;
template <int INPUTS>
constexpr int ROW_STRIDE = ceil_div(INPUTS, ROW_ALIGN) * ROW_ALIGN + ROW_PAD;

// One thread finishes a pair of outputs, PAIR_STRIDE apart: the two that RoPE or SwiGLU combines. Elsewhere a
// pair is two neighbours. A tile consists of PAIRS neighbouring pairs.
template <typename M, int KIND>
struct Matmul {
    static constexpr int UP_WIDTH = (M::GATED ? 2 : 1) * M::FFN;
    static constexpr int OUTPUTS = KIND == QKV ? M::QKV_WIDTH : KIND == UP ? UP_WIDTH : M::DIM;
    static constexpr int INPUTS = KIND == DOWN ? M::FFN : M::DIM;
    static constexpr int PAIR_STRIDE =
        KIND == QKV && M::ROPE ? M::HEAD_DIM / 2 : KIND == UP && M::GATED ? M::FFN : 1;
    static constexpr int TILES = OUTPUTS / TILE, MAX_TILES_PER_BLOCK = ceil_div(TILES, M::BLOCKS);
    static constexpr int STEPS = ceil_div(INPUTS, STEP);
    static constexpr int MAX_K_SPLITS = const_max(1, const_min(WARPS / MAX_TILES_PER_BLOCK, STEPS));
    static constexpr int STEPS_PER_ITEM = ceil_div(STEPS, MAX_K_SPLITS);
    static constexpr int K_SPLITS = ceil_div(STEPS, STEPS_PER_ITEM);
    static constexpr int MAX_ITEMS = MAX_TILES_PER_BLOCK * K_SPLITS;
    static constexpr int WEIGHT_BYTES = MAX_TILES_PER_BLOCK * TILE * ROW_STRIDE<INPUTS> * 2;
    // Every item has STEPS_PER_ITEM whole steps.
    static constexpr bool NO_TAIL = INPUTS % STEP == 0 && STEPS % K_SPLITS == 0;
    static_assert(OUTPUTS % (2 * PAIR_STRIDE) == 0 && OUTPUTS % TILE == 0 && INPUTS % BF16_VEC == 0);

    // Tiles of this block.
    static int tiles() {
        return (int)blockIdx.x < TILES ? (TILES - 1 - (int)blockIdx.x) / M::BLOCKS + 1 : 0;
    }
    // The lower output of a pair of the block's i-th tile.
    static int first_output(int i, int pair) {
        const int p = (blockIdx.x + i * M::BLOCKS) * PAIRS + pair;
        return p + p / PAIR_STRIDE * PAIR_STRIDE;
    }
    // The row of the tile, 0 .. TILE - 1, that holds the lower (0) or upper (1) output of a pair.
    static constexpr int row_in_tile(int pair, int upper) {
        return PAIR_STRIDE == 1 ? 2 * pair + upper : pair + upper * PAIRS;
    }
    // The output that a row of the block's i-th tile holds.
    static int output(int i, int row) {
        const int pair = PAIR_STRIDE == 1 ? row / 2 : row % PAIRS;
        const int upper = PAIR_STRIDE == 1 ? row % 2 : row / PAIRS;
        return first_output(i, pair) + upper * PAIR_STRIDE;
    }
};

// The head's steps are loaded in groups of GROUP. One pipeline stage holds one group for each warp.
template <typename M>
struct HeadSteps {
    static constexpr int STEPS = ceil_div(M::DIM, STEP);
    static constexpr int GROUP = STEPS % 4 == 0 ? 4 : STEPS % 2 == 0 ? 2 : 1, GROUPS = STEPS / GROUP;
    static constexpr int STAGE_BYTES = WARPS * GROUP * WARP * 16;
};

// Shared memory layout, in bytes. The weights of the n-th matmul are prefetched into region n % REGIONS.
// While one matmul is computed, the weights of the next REGIONS - 1 are in flight.
template <typename M, int ROWS, int REGIONS>
struct SmemLayout {
    template <int KIND>
    static constexpr int bytes_in(int region) {
        return KIND % REGIONS == region ? Matmul<M, KIND>::WEIGHT_BYTES : 0;
    }
    static constexpr int region_bytes(int i) {
        return const_max(const_max(bytes_in<QKV>(i), bytes_in<PROJ>(i)),
                         const_max(bytes_in<UP>(i), bytes_in<DOWN>(i)));
    }
    static constexpr int region_offset(int kind) {
        int offset = 0;
        for (int i = 0; i < kind % REGIONS; i++) offset += region_bytes(i);
        return offset;
    }
    static constexpr int REGION_BYTES = region_offset(REGIONS - 1) + region_bytes(REGIONS - 1);
    // The head reuses the regions as its pipeline stages.
    static constexpr int WEIGHT_BYTES = const_max(REGION_BYTES, HeadSteps<M>::STAGE_BYTES);
    static constexpr int MAX_ITEMS =
        const_max(const_max(Matmul<M, QKV>::MAX_ITEMS, Matmul<M, PROJ>::MAX_ITEMS),
                  const_max(Matmul<M, UP>::MAX_ITEMS, Matmul<M, DOWN>::MAX_ITEMS));
    static constexpr int PARTIAL_SUM_BYTES = MAX_ITEMS * ROWS * TILE * 4;
};

template <typename M, int ROWS>
constexpr int INPUT_ROWS_BYTES = ROWS * ROW_STRIDE<const_max(M::DIM, M::FFN)> * 2;
