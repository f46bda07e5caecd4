// The matmuls of decode_step.cu on tensor cores: a layer's four, and the prediction head. decode_model.cuh
// says how blocks and warps divide the work.
#pragma once

#include "copies.cuh"
#include "decode_model.cuh"
#include "hopper.cuh"
#include "inter_block.cuh"
#include "mma.cuh"

// All threads: start to prefetch the block's weight rows of one matmul into a region. On Hopper the last warp
// issues one bulk copy (TMA) a row, so the other warps' loads do not queue behind the weights. `barrier`
// counts the arrived bytes.
template <typename Sizes>
void prefetch_weights(unsigned char* region, const bf16* weight, unsigned barrier,
                      unsigned long long policy) {
    constexpr int STRIDE_BYTES = ROW_STRIDE<Sizes::INPUTS> * 2;
    const int rows = Sizes::tiles() * TILE;
    const auto row = [&](int r) {
        return weight + (long long)Sizes::output(r / TILE, r % TILE) * Sizes::INPUTS;
    };
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x / WARP < WARPS - 1) return;
    const int lane = threadIdx.x % WARP;
    if (lane == 0) arrive_expecting(barrier, rows * Sizes::INPUTS * 2);
    __syncwarp();  // the barrier expects the bytes before the first copy can complete
    for (int r = lane; r < rows; r += WARP)
        bulk_load_hint(shared_address(region) + r * STRIDE_BYTES, row(r), Sizes::INPUTS * 2, barrier, policy);
#else
    constexpr int VECS_PER_ROW = Sizes::INPUTS / BF16_VEC;
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
template <typename Sizes, int ROWS>
void multiply(float* partial_sums, const unsigned char* region, const bf16* smem_x) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = lane / LANES_PER_ROW;
    const int tiles = Sizes::tiles();
#pragma unroll
    for (int first = 0; first < Sizes::MAX_ITEMS; first += WARPS) {
        const int item = first + warp, step = item % Sizes::K_SPLITS * Sizes::STEPS_PER_ITEM;
        const int k = step * STEP + lane % LANES_PER_ROW * BF16_VEC;
        if (item / Sizes::K_SPLITS >= tiles) break;
        const bf16* const w = reinterpret_cast<const bf16*>(region) +
                              (item / Sizes::K_SPLITS * TILE + row) * ROW_STRIDE<Sizes::INPUTS> + k;
        const bf16* const x = smem_x + row * ROW_STRIDE<Sizes::INPUTS> + k;
        const uint4 zeros = make_uint4(0, 0, 0, 0);
        float c[2][4] = {};
#pragma unroll 4  // a full unroll needs too many registers with wide models
        for (int s = 0; s < Sizes::STEPS_PER_ITEM; s++) {
            const bool in_range = Sizes::NO_TAIL || k + s * STEP < Sizes::INPUTS;
            multiply_step(c, in_range ? load_vec(w + s * STEP) : zeros,
                          in_range && row < ROWS ? load_vec(x + s * STEP) : zeros);
        }
        if (row < ROWS)
            *reinterpret_cast<float2*>(partial_sums + (item * ROWS + row) * TILE + lane % LANES_PER_ROW * 2) =
                make_float2(c[0][0] + c[1][0], c[0][1] + c[1][1]);
    }
}

// The one pair of outputs, of one row, that a thread finishes: pair `pair` of the block's tile-th tile.
template <typename Sizes, int ROWS>
struct OutputPair {
    int tile, row, pair, first;  // first: the lower output
    bool valid;                  // whether this thread has a pair
    static_assert(Sizes::MAX_TILES_PER_BLOCK * ROWS * PAIRS <= THREADS);

    OutputPair()
        : tile(threadIdx.x / (PAIRS * ROWS)), row(threadIdx.x / PAIRS % ROWS), pair(threadIdx.x % PAIRS) {
        valid = tile < Sizes::tiles();
        first = valid ? Sizes::first_output(tile, pair) : 0;
    }
    // Both outputs: partial sums added in item order.
    void reduce(float& a, float& b, const float* partial_sums) const {
        a = b = 0.0f;
        if (!valid) return;
#pragma unroll
        for (int split = 0; split < Sizes::K_SPLITS; split++) {
            const float* const item = partial_sums + ((tile * Sizes::K_SPLITS + split) * ROWS + row) * TILE;
            a += item[Sizes::row_in_tile(pair, 0)], b += item[Sizes::row_in_tile(pair, 1)];
        }
    }
};

// Weights and biases of layer 0's matmuls. Those of layer i lie i * stride elements further.
struct Layers {
    const bf16 *weight[MATMULS], *bias[MATMULS];
    long long stride;
    int layers;
};

// The matmuls of a launch, numbered n = layer * MATMULS + kind.
//
// Tags: results of matmul n are published with tag 1 + n. So its inputs, from the matmul before, carry tag n.
// Attention is no matmul and shares proj's n. So splits carry 1 + n, though proj polls for them:
//
//     phase       polls for, with its tag                  publishes with 1 + n     kind, n % MATMULS
//     qkv         stream (embedding in layer 0), n         qkv                      QKV
//     attention   qkv, n                                   splits                   PROJ
//     proj        splits, 1 + n                            stream                   PROJ
//     up          stream, n                                act                      UP
//     down        act, n                                   stream                   DOWN
template <typename M, int ROWS, int REGIONS>
struct Matmuls {
    const Layers& model;
    // Shared memory:
    unsigned char* const weights;
    bf16* const smem_x;
    float* const partial_sums;
    const Barriers weights_arrived;  // one mbarrier a region
    const unsigned long long policy;

    template <int KIND>
    void prefetch(int n) const {
        const bf16* const weight = model.weight[KIND] + n / MATMULS * model.stride;
        unsigned char* const region = weights + SmemLayout<M, ROWS, REGIONS>::region_offset(KIND);
        if (n < model.layers * MATMULS)
            prefetch_weights<Matmul<M, KIND>>(region, weight, weights_arrived[n % REGIONS], policy);
        else
            cp_async_commit();  // an empty group, so cp_async_wait counts the same throughout
    }
    // Matmul n. load_x() writes the input rows to smem_x. finish(out, a, b) receives the thread's pair of
    // outputs; it is called by whole warps, threads without a pair included.
    template <int KIND, typename LoadX, typename Finish>
    void run(int n, LoadX load_x, Finish finish) const {
        using Sizes = Matmul<M, KIND>;
        const OutputPair<Sizes, ROWS> out;
        const bool has_bias = model.bias[KIND] != nullptr;
        bf16 bias[2];
        if (has_bias && out.valid) {  // in flight while the block polls
            const bf16* const first = model.bias[KIND] + n / MATMULS * model.stride + out.first;
            bias[0] = first[0], bias[1] = first[Sizes::PAIR_STRIDE];
        }
        // A block without tiles must not poll for inputs. No block waits for it, so its inputs may already be
        // overwritten.
        if (Sizes::tiles() > 0) load_x();
        wait_weights<REGIONS - 1>(weights_arrived[n % REGIONS], n / REGIONS % 2);
        __syncthreads();  // separates the writes of smem_x, and the weights' arrival, from the matmul's reads
        multiply<Sizes, ROWS>(partial_sums, weights + SmemLayout<M, ROWS, REGIONS>::region_offset(KIND),
                              smem_x);
        // Separates the writes of partial_sums from their reads below, and the reads of smem_x and of the
        // weights from the next writes there.
        __syncthreads();
        if (threadIdx.x / WARP * WARP < Sizes::MAX_TILES_PER_BLOCK * ROWS * PAIRS) {  // warp-uniform
            float a, b;
            out.reduce(a, b, partial_sums);
            if (has_bias) a += to_float(bias[0]), b += to_float(bias[1]);
            finish(out, a, b);
        }
        prefetch<(KIND + REGIONS) % MATMULS>(n + REGIONS);
    }
};

// Publish a pair of outputs as bf16, two neighbouring elements a word. With stride > 1 the neighbours of a
// pair's outputs belong to the next pair, so lanes of neighbouring pairs exchange: the even one gets both a,
// the odd one both b.
template <typename Pair>
void publish_packed(Word* row, const Pair& out, int stride, float a, float b, unsigned tag) {
    if (stride == 1) {
        if (out.valid) publish(row + out.first / 2, pack(a, b), tag);
        return;
    }
    const bool odd = out.pair % 2;
    const float other = __shfl_xor_sync(ALL_LANES, odd ? a : b, 1);
    const int column = odd ? out.first - 1 + stride : out.first;
    if (out.valid) publish(row + column / 2, odd ? pack(other, b) : pack(a, other), tag);
}

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
