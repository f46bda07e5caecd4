// The products of decode_step.cu: how blocks and warps share them out, and where their weights wait in shared memory.
//
//     out[r, n] = sum over k of x[r, k] w[n, k]
//
// A tile is 8 outputs, the right factor of a tensor-core product, whose left one is the few rows and zeros below them; a step is 32
// inputs of a tile, two such products and 16 bytes of weights a lane. A block has every BLOCKS-th tile. Its items, a tile's share
// of the steps, are a warp's each; a tile's sums are added up in shared memory, in the order of their items. So qkv of gpt2_124m, 2304
// outputs of 768 inputs, on 132 multiprocessors: 288 tiles, 3 of a block at MOST, of 24 STEPS in 4 SPLITS; 12 items of 6 steps, one a warp.
#pragma once

#include "copies.cuh"
#include "hopper.cuh"
#include "mma.cuh"

constexpr int WARPS = 12, THREADS = WARPS * WARP;
constexpr int TILE = 8, PAIRS = TILE / 2, STEP = 32;
constexpr int VECTOR = 8, COLUMNS = STEP / VECTOR;  // of a step a lane has 16 bytes of a row: lane / COLUMNS is mma.cuh's g, the rest t

// The products of a layer.
enum Which { QKV, PROJ, UP, DOWN, PRODUCTS };

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int parts(int whole, int part) { return (whole + part - 1) / part; }

template <int BLOCKS_, int DIM_, int HEADS_, int KV_HEADS_, int HEAD_DIM_, int FFN_, bool ROPE_, bool GATED_>
struct Model {
    static constexpr int BLOCKS = BLOCKS_, DIM = DIM_, HEADS = HEADS_, KV_HEADS = KV_HEADS_, HEAD_DIM = HEAD_DIM_, FFN = FFN_;
    static constexpr int WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM;  // of qkv
    static constexpr bool ROPE = ROPE_, GATED = GATED_;
};

// A row of inputs, or of weights, in shared memory: 64 bytes further than the one before, modulo 128, as no two of 8 lanes then share
// a bank.
template <int INPUTS>
constexpr int ROW_STRIDE = parts(INPUTS, 64) * 64 + 32;

// Outputs come in pairs, DISTANCE apart: neighbours, or what SwiGLU or RoPE puts together. A tile is PAIRS neighbouring pairs.
template <typename M, int WHICH>
struct Product {
    static constexpr int OUTPUTS = WHICH == QKV ? M::WIDTH : WHICH == UP ? (M::GATED ? 2 : 1) * M::FFN : M::DIM;
    static constexpr int INPUTS = WHICH == DOWN ? M::FFN : M::DIM;
    static constexpr int DISTANCE = WHICH == QKV && M::ROPE ? M::HEAD_DIM / 2 : WHICH == UP && M::GATED ? M::FFN : 1;
    static constexpr int TILES = OUTPUTS / TILE, MOST = parts(TILES, M::BLOCKS);  // MOST: of a block
    static constexpr int STEPS = parts(INPUTS, STEP), OF_ITEM = parts(STEPS, larger(1, smaller(WARPS / MOST, STEPS)));
    static constexpr int SPLITS = parts(STEPS, OF_ITEM), ITEMS = MOST * SPLITS, BYTES = MOST * TILE * ROW_STRIDE<INPUTS> * 2;
    static constexpr bool EVEN = INPUTS % STEP == 0 && STEPS % SPLITS == 0;  // all items have the same work
    static_assert(OUTPUTS % (2 * DISTANCE) == 0 && OUTPUTS % TILE == 0 && INPUTS % VECTOR == 0);

    static int tiles() { return (int)blockIdx.x < TILES ? (TILES - 1 - (int)blockIdx.x) / M::BLOCKS + 1 : 0; }  // of this block
    // The first output of a pair of the block's i-th tile.
    static int first(int i, int pair) {
        const int p = (blockIdx.x + i * M::BLOCKS) * PAIRS + pair;
        return p + p / DISTANCE * DISTANCE;
    }
    // Where a pair's first or second output stands within its tile.
    static constexpr int place(int pair, int second) { return DISTANCE == 1 ? 2 * pair + second : pair + second * PAIRS; }
    static int output(int i, int place) {
        const int pair = DISTANCE == 1 ? place / 2 : place % PAIRS, second = DISTANCE == 1 ? place % 2 : place / PAIRS;
        return first(i, pair) + second * DISTANCE;
    }
};

// The head's steps come in groups; a place is what holds one of each warp.
template <typename M>
struct HeadSteps {
    static constexpr int STEPS = parts(M::DIM, STEP), GROUP = STEPS % 4 == 0 ? 4 : STEPS % 2 == 0 ? 2 : 1, GROUPS = STEPS / GROUP;
    static constexpr int PLACE = WARPS * GROUP * WARP * 16;
};

// Shared memory, in bytes. The n-th product's weights wait in region n % REGIONS: of the next REGIONS - 1 products they come while
// one is computed.
template <typename M, int ROWS, int REGIONS>
struct Memory {
    template <int WHICH>
    static constexpr int in_region(int region) { return WHICH % REGIONS == region ? Product<M, WHICH>::BYTES : 0; }
    static constexpr int region(int i) {
        return larger(larger(in_region<QKV>(i), in_region<PROJ>(i)), larger(in_region<UP>(i), in_region<DOWN>(i)));
    }
    static constexpr int begin(int which) {
        int at = 0;
        for (int i = 0; i < which % REGIONS; i++) at += region(i);
        return at;
    }
    static constexpr int ITEMS = larger(larger(Product<M, QKV>::ITEMS, Product<M, PROJ>::ITEMS),
                                        larger(Product<M, UP>::ITEMS, Product<M, DOWN>::ITEMS));
    static constexpr int WEIGHTS = larger(begin(REGIONS - 1) + region(REGIONS - 1), HeadSteps<M>::PLACE), SUMS = ITEMS * ROWS * TILE * 4;
};

template <typename M, int ROWS>
constexpr int ROWS_BYTES = ROWS * ROW_STRIDE<larger(M::DIM, M::FFN)> * 2;

// Start to copy the block's rows of weights of a product, all threads: on Hopper the copy engine takes a row at a time, at the request
// of the last warp, so that the others' loads need not queue behind the rows; and `barrier` counts what has come.
template <typename P>
void fetch_weights(unsigned char* region, const bf16* weight, unsigned barrier, unsigned long long policy) {
    constexpr int STRIDE = ROW_STRIDE<P::INPUTS> * 2;
    const int rows = P::tiles() * TILE;
    const auto row = [&](int r) { return weight + (long long)P::output(r / TILE, r % TILE) * P::INPUTS; };
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x / WARP < WARPS - 1) return;
    const int lane = threadIdx.x % WARP;
    if (lane == 0) arrive_expecting(barrier, rows * P::INPUTS * 2);
    __syncwarp();  // what comes is expected before it does
    for (int r = lane; r < rows; r += WARP) bulk_load_hint(shared_address(region) + r * STRIDE, row(r), P::INPUTS * 2, barrier, policy);
#else
    constexpr int OF_ROW = P::INPUTS / VECTOR;
    for (int i = threadIdx.x; i < rows * OF_ROW; i += THREADS) {
        const int r = i / OF_ROW, vector = i % OF_ROW;
        cp_async_hint(shared_address(region) + r * STRIDE + vector * 16, row(r) + vector * VECTOR, true, policy);
    }
    cp_async_commit();
#endif
}

// Until all that was fetched has come but, where copies are counted by groups, the last PENDING times. __syncthreads must follow.
template <int PENDING>
void await_weights(unsigned barrier, int parity) {
#if __CUDA_ARCH__ >= 900
    wait(barrier, parity);
#else
    cp_async_wait<PENDING>();
#endif
}

inline uint4 vector_at(const bf16* address) { return *reinterpret_cast<const uint4*>(address); }

// c += x w of one step, in two sums that do not wait for each other. x: the lane's row of the block's inputs, if it has one. A lane's 8
// neighbouring inputs stand where mma.cuh has columns 2t, 2t + 1 and those 8 further, of two products: terms may come in any order
// that both factors have.
inline void multiply_step(float (&c)[2][4], const uint4& w, const uint4& x) {
    const unsigned low[4] = {x.x, 0, x.y, 0}, high[4] = {x.z, 0, x.w, 0};
    mma_bf16(c[0], low, w.x, w.y);
    mma_bf16(c[1], high, w.z, w.w);
}

// sums [ITEMS][ROWS][TILE] = the items' sums, of rows [ROWS][ROW_STRIDE]. The warps have waited for their weights.
template <typename P, int ROWS>
void multiply(float* sums, const unsigned char* region, const bf16* rows) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = lane / COLUMNS, tiles = P::tiles();
#pragma unroll
    for (int first = 0; first < P::ITEMS; first += WARPS) {
        const int item = first + warp, step = item % P::SPLITS * P::OF_ITEM, at = step * STEP + lane % COLUMNS * VECTOR;
        if (item / P::SPLITS >= tiles) break;
        const bf16* const w = reinterpret_cast<const bf16*>(region) + (item / P::SPLITS * TILE + row) * ROW_STRIDE<P::INPUTS> + at;
        const bf16* const x = rows + row * ROW_STRIDE<P::INPUTS> + at;
        const uint4 zeros = make_uint4(0, 0, 0, 0);
        float c[2][4] = {};
#pragma unroll 4  // more would take too many registers of wide models
        for (int s = 0; s < P::OF_ITEM; s++) {
            const bool within = P::EVEN || at + s * STEP < P::INPUTS;
            multiply_step(c, within ? vector_at(w + s * STEP) : zeros, within && row < ROWS ? vector_at(x + s * STEP) : zeros);
        }
        if (row < ROWS)
            *reinterpret_cast<float2*>(sums + (item * ROWS + row) * TILE + lane % COLUMNS * 2) =
                make_float2(c[0][0] + c[1][0], c[0][1] + c[1][1]);
    }
}

// A thread's part of a product's results: of the block's i-th tile, the pair that begins at output `first`, of one row.
template <typename P, int ROWS>
struct Result {
    int i, row, pair, first;
    bool valid;
    static_assert(P::MOST * ROWS * PAIRS <= THREADS);

    Result() : i(threadIdx.x / (PAIRS * ROWS)), row(threadIdx.x / PAIRS % ROWS), pair(threadIdx.x % PAIRS) {
        valid = i < P::tiles();
        first = valid ? P::first(i, pair) : 0;
    }
    // Both outputs, added up over the items of the tile.
    void add_up(float& a, float& b, const float* sums) const {
        a = b = 0.0f;
        if (!valid) return;
#pragma unroll
        for (int split = 0; split < P::SPLITS; split++) {
            const float* const of_item = sums + ((i * P::SPLITS + split) * ROWS + row) * TILE;
            a += of_item[P::place(pair, 0)], b += of_item[P::place(pair, 1)];
        }
    }
};

// The prediction head, logits (ROWS, vocab) = rows head^T: a warp has every WARPS-th of the block's tiles, and all of their inputs, as
// a row of groups of steps that pass through RING places of shared memory.
template <typename M, int ROWS, int BYTES>
struct Head {
    static constexpr int GROUP = HeadSteps<M>::GROUP, GROUPS = HeadSteps<M>::GROUPS, RING = smaller(8, BYTES / HeadSteps<M>::PLACE);
    const bf16* weight;
    unsigned long long policy;
    uint4* ring;  // [RING][GROUP][WARP], this warp's
    int tiles, tile, group;  // of what is copied next

    Head(const bf16* weight_, int vocab, unsigned char* memory, unsigned long long policy_)
        : weight(weight_), policy(policy_), ring(reinterpret_cast<uint4*>(memory) + threadIdx.x / WARP * RING * GROUP * WARP),
          tiles(vocab / TILE), tile(blockIdx.x + threadIdx.x / WARP * M::BLOCKS), group(0) {
        for (int place = 0; place < RING; place++) fetch(place);
    }
    void fetch(int place) {
        if (tile < tiles) {
            const int lane = threadIdx.x % WARP, at = group * GROUP * STEP + lane % COLUMNS * VECTOR;
            const bf16* const from = weight + ((long long)tile * TILE + lane / COLUMNS) * M::DIM + at;
#pragma unroll
            for (int s = 0; s < GROUP; s++)
                cp_async_hint(shared_address(ring + (place * GROUP + s) * WARP + lane), from + s * STEP,
                                M::DIM % STEP == 0 || at + s * STEP < M::DIM, policy);
            if (++group == GROUPS) group = 0, tile += WARPS * M::BLOCKS;
        }
        cp_async_commit();  // an empty group at the end, so that a wait means the same all along
    }
    void multiply(bf16* logits, int vocab, const bf16* rows) {
        const int lane = threadIdx.x % WARP, row = lane / COLUMNS, column = lane % COLUMNS;
        const bf16* const x = rows + row * ROW_STRIDE<M::DIM> + column * VECTOR;
        const uint4 zeros = make_uint4(0, 0, 0, 0);
        int place = 0;
        for (int t = blockIdx.x + threadIdx.x / WARP * M::BLOCKS; t < tiles; t += WARPS * M::BLOCKS) {
            float c[2][4] = {};
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                cp_async_wait<RING - 1>();
#pragma unroll
                for (int s = 0; s < GROUP; s++) {
                    const int at = (g * GROUP + s) * STEP;
                    const bool within = row < ROWS && (M::DIM % STEP == 0 || at + column * VECTOR < M::DIM);
                    multiply_step(c, ring[(place * GROUP + s) * WARP + lane], within ? vector_at(x + at) : zeros);
                }
                fetch(place);
                if (++place == RING) place = 0;
            }
            if (row < ROWS)
                *reinterpret_cast<unsigned*>(logits + (long long)row * vocab + t * TILE + column * 2) =
                    pack(c[0][0] + c[1][0], c[0][1] + c[1][1]);
        }
    }
};
