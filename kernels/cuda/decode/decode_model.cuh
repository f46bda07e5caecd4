// The matmuls of decode_step.cu: how blocks and warps divide the work, and the layout of shared memory.
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

#include "copies.cuh"
#include "hopper.cuh"
#include "mma.cuh"

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

template <int BLOCKS_, int DIM_, int HEADS_, int KV_HEADS_, int HEAD_DIM_, int FFN_, bool ROPE_, bool GATED_>
struct Model {
    static constexpr int BLOCKS = BLOCKS_, DIM = DIM_, HEADS = HEADS_, KV_HEADS = KV_HEADS_;
    static constexpr int HEAD_DIM = HEAD_DIM_, FFN = FFN_;
    static constexpr int QKV_WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
    static constexpr bool ROPE = ROPE_, GATED = GATED_;
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
constexpr int INPUT_ROW_BYTES = ROWS * ROW_STRIDE<const_max(M::DIM, M::FFN)> * 2;

// All threads: start to prefetch the block's weight rows of one matmul into a region. On Hopper the last warp
// issues one bulk copy (TMA) a row, so the other warps' loads do not queue behind the weights. `barrier`
// counts the arrived bytes.
template <typename P>
void prefetch_weights(unsigned char* region, const bf16* weight, unsigned barrier,
                      unsigned long long policy) {
    constexpr int STRIDE_BYTES = ROW_STRIDE<P::INPUTS> * 2;
    const int rows = P::tiles() * TILE;
    const auto row = [&](int r) {
        return weight + (long long)P::output(r / TILE, r % TILE) * P::INPUTS;
    };
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x / WARP < WARPS - 1) return;
    const int lane = threadIdx.x % WARP;
    if (lane == 0) arrive_expecting(barrier, rows * P::INPUTS * 2);
    __syncwarp();  // the barrier expects the bytes before the first copy can complete
    for (int r = lane; r < rows; r += WARP)
        bulk_load_hint(shared_address(region) + r * STRIDE_BYTES, row(r), P::INPUTS * 2, barrier, policy);
#else
    constexpr int VECS_PER_ROW = P::INPUTS / BF16_VEC;
    for (int i = threadIdx.x; i < rows * VECS_PER_ROW; i += THREADS) {
        const int r = i / VECS_PER_ROW, vec = i % VECS_PER_ROW;
        const unsigned target = shared_address(region) + r * STRIDE_BYTES + vec * 16;
        cp_async_hint(target, row(r) + vec * BF16_VEC, true, policy);
    }
    cp_async_commit();
#endif
}

// Wait for the oldest prefetch. Before sm_90: for all but the last PENDING cp.async groups of this thread.
// The caller must follow with __syncthreads.
template <int PENDING>
void wait_weights(unsigned barrier, int parity) {
#if __CUDA_ARCH__ >= 900
    wait(barrier, parity);
#else
    cp_async_wait<PENDING>();
#endif
}

inline uint4 load_vec(const bf16* address) { return *reinterpret_cast<const uint4*>(address); }

// c += x w of one step, in two independent accumulators. x is the lane's row of the input, or zeros. The K
// index is permuted: a lane's 8 consecutive elements fill columns 2t, 2t + 1, 2t + 8 and 2t + 9 of two MMAs.
// Both operands use the same permutation, so every product x[k] w[k] is formed exactly once.
inline void multiply_step(float (&c)[2][4], const uint4& w, const uint4& x) {
    const unsigned low[4] = {x.x, 0, x.y, 0}, high[4] = {x.z, 0, x.w, 0};
    mma_bf16(c[0], low, w.x, w.y);
    mma_bf16(c[1], high, w.z, w.w);
}

// partial_sums [MAX_ITEMS][ROWS][TILE] = each item's sums, from the input rows smem_x [ROWS][ROW_STRIDE]. The
// caller has waited for the weights.
template <typename P, int ROWS>
void multiply(float* partial_sums, const unsigned char* region, const bf16* smem_x) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = lane / LANES_PER_ROW;
    const int tiles = P::tiles();
#pragma unroll
    for (int first = 0; first < P::MAX_ITEMS; first += WARPS) {
        const int item = first + warp, step = item % P::K_SPLITS * P::STEPS_PER_ITEM;
        const int k = step * STEP + lane % LANES_PER_ROW * BF16_VEC;
        if (item / P::K_SPLITS >= tiles) break;
        const bf16* const w = reinterpret_cast<const bf16*>(region) +
                              (item / P::K_SPLITS * TILE + row) * ROW_STRIDE<P::INPUTS> + k;
        const bf16* const x = smem_x + row * ROW_STRIDE<P::INPUTS> + k;
        const uint4 zeros = make_uint4(0, 0, 0, 0);
        float c[2][4] = {};
#pragma unroll 4  // a full unroll needs too many registers with wide models
        for (int s = 0; s < P::STEPS_PER_ITEM; s++) {
            const bool in_range = P::NO_TAIL || k + s * STEP < P::INPUTS;
            multiply_step(c, in_range ? load_vec(w + s * STEP) : zeros,
                          in_range && row < ROWS ? load_vec(x + s * STEP) : zeros);
        }
        if (row < ROWS)
            *reinterpret_cast<float2*>(partial_sums + (item * ROWS + row) * TILE + lane % LANES_PER_ROW * 2) =
                make_float2(c[0][0] + c[1][0], c[0][1] + c[1][1]);
    }
}

// The one pair of outputs, of one row, that a thread finishes: pair `pair` of the block's tile-th tile.
template <typename P, int ROWS>
struct OutputPair {
    int tile, row, pair, first;  // first: the lower output
    bool valid;                  // whether this thread has a pair
    static_assert(P::MAX_TILES_PER_BLOCK * ROWS * PAIRS <= THREADS);

    OutputPair()
        : tile(threadIdx.x / (PAIRS * ROWS)), row(threadIdx.x / PAIRS % ROWS), pair(threadIdx.x % PAIRS) {
        valid = tile < P::tiles();
        first = valid ? P::first_output(tile, pair) : 0;
    }
    // Both outputs: partial sums added in item order.
    void reduce(float& a, float& b, const float* partial_sums) const {
        a = b = 0.0f;
        if (!valid) return;
#pragma unroll
        for (int split = 0; split < P::K_SPLITS; split++) {
            const float* const item = partial_sums + ((tile * P::K_SPLITS + split) * ROWS + row) * TILE;
            a += item[P::row_in_tile(pair, 0)], b += item[P::row_in_tile(pair, 1)];
        }
    }
};

// The prediction head: logits (ROWS, vocab) = x head^T. A warp computes every WARPS-th of the block's tiles
// over all of K. Its weights stream through a software pipeline of STAGES stages in shared memory, one group
// of steps a stage.
template <typename M, int ROWS, int BYTES>
struct Head {
    static constexpr int GROUP = HeadSteps<M>::GROUP, GROUPS = HeadSteps<M>::GROUPS;
    static constexpr int STAGES = const_min(8, BYTES / HeadSteps<M>::STAGE_BYTES);  // at most 8: not tuned
    const bf16* weight;
    unsigned long long policy;
    uint4* stages;  // [STAGES][GROUP][WARP] of this warp
    int tiles;
    int next_tile, next_group;  // of the next prefetch

    Head(const bf16* weight_, int vocab, unsigned char* smem, unsigned long long policy_)
        : weight(weight_), policy(policy_),
          stages(reinterpret_cast<uint4*>(smem) + threadIdx.x / WARP * STAGES * GROUP * WARP),
          tiles(vocab / TILE), next_tile(blockIdx.x + threadIdx.x / WARP * M::BLOCKS), next_group(0) {
        for (int stage = 0; stage < STAGES; stage++) prefetch(stage);
    }
    void prefetch(int stage) {
        if (next_tile < tiles) {
            const int lane = threadIdx.x % WARP;
            const int k = next_group * GROUP * STEP + lane % LANES_PER_ROW * BF16_VEC;
            const long long row = (long long)next_tile * TILE + lane / LANES_PER_ROW;
            const bf16* const source = weight + row * M::DIM + k;
#pragma unroll
            for (int s = 0; s < GROUP; s++)
                cp_async_hint(shared_address(stages + (stage * GROUP + s) * WARP + lane), source + s * STEP,
                              M::DIM % STEP == 0 || k + s * STEP < M::DIM, policy);
            if (++next_group == GROUPS) next_group = 0, next_tile += WARPS * M::BLOCKS;
        }
        cp_async_commit();  // an empty group at the end, so cp_async_wait counts the same throughout
    }
    void multiply(bf16* logits, int vocab, const bf16* smem_x) {
        const int lane = threadIdx.x % WARP, row = lane / LANES_PER_ROW, column = lane % LANES_PER_ROW;
        const bf16* const x = smem_x + row * ROW_STRIDE<M::DIM> + column * BF16_VEC;
        const uint4 zeros = make_uint4(0, 0, 0, 0);
        int stage = 0;
        const int first_tile = blockIdx.x + threadIdx.x / WARP * M::BLOCKS;
        for (int t = first_tile; t < tiles; t += WARPS * M::BLOCKS) {
            float c[2][4] = {};
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                cp_async_wait<STAGES - 1>();  // no barrier: a lane reads only what it has copied itself
#pragma unroll
                for (int s = 0; s < GROUP; s++) {
                    const int k = (g * GROUP + s) * STEP;
                    const bool in_range =
                        row < ROWS && (M::DIM % STEP == 0 || k + column * BF16_VEC < M::DIM);
                    multiply_step(c, stages[(stage * GROUP + s) * WARP + lane],
                                  in_range ? load_vec(x + k) : zeros);
                }
                prefetch(stage);
                if (++stage == STAGES) stage = 0;
            }
            if (row < ROWS)
                *reinterpret_cast<unsigned*>(logits + (long long)row * vocab + t * TILE + column * 2) =
                    pack(c[0][0] + c[1][0], c[0][1] + c[1][1]);
        }
    }
};
