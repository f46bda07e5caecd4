// A linear layer's product and the GELU beside it in one kernel, for Hopper. bf16.
//
//     forward     up  = a b^T (+ bias),       act = gelu(up)                     a (m, k) activations, b (n, k) weights
//     backward    dup = (a b) gelu'(up),      dbias = sum over rows of dup       a (m, k) gradients, b (k, n) weights
//
// Layout: a, b, up, act and dup row-major; up, act and dup (m, n). 64 divides n and k. bias (n,) bf16. partial (4 ceil(m / TILE), n)
//         fp32: of dbias, a row for each warp of each tile, which columns.cu adds up.
// Work: a block stays on its multiprocessor and takes every so-manieth tile, TILE x TILE of the results, along a row of tiles first.
//       Two warpgroups multiply in turns, a tile each, both from one queue of STAGES stages of DEPTH terms: so one rounds, applies
//       GELU and stores while the other keeps the tensor cores busy. In a third warpgroup one thread copies the factors. The
//       blocks of a cluster own tiles one below the other: each copies half of the columns' factor, to both.
// Stage: free once both blocks' products have read it, as each block's copies go to both.
// Turns: a barrier tells a phase from the one before, not from an earlier one; so a warpgroup begins to wait for its first factors
//        when the other has seen those arrive that were in the same place before.
// On its way out, and `up` on its way in, a tile lies as 2 x 2 tiles of hopper.cuh, which the warpgroup has for itself.
// Precision: products of bf16 with fp32 sums; up and dup are rounded once, act is GELU's of up before rounding, dbias sums dup
//            before that.
// Determinism: each element's sum is over k in order, each of partial's over rows in a fixed order; no atomics.
// Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2 (GELU, with tanh); Shah et al. 2024, arXiv:2407.08608, section 3.1
//         (warpgroups in turns); PTX ISA, "Asynchronous warpgroup level matrix instructions".

#include "activation.cuh"
#include "hopper.cuh"

constexpr int TILE = 128, DEPTH = 64, STAGES = 5, GROUPS = 2, CLUSTER = 2;
constexpr int BOX = 64, BOX_BYTES = BOX * TILE_ROW_BYTES;  // a tile of hopper.cuh: what is copied at a time
constexpr int FACTOR_BYTES = TILE * DEPTH * 2, OWN_BYTES = TILE * TILE * 2;
constexpr int PARTS = OWN_BYTES / BOX_BYTES;
constexpr int PLACES = 1, TURNS = PLACES + GROUPS;  // hardware barriers, one a warpgroup: of its tile's place, of its turn

// Addresses in shared memory.
struct Layout {
    unsigned a, b, own;  // STAGES of each factor, side by side; a tile of each warpgroup
    Barriers full, empty, up_full;

    explicit Layout(const unsigned char* memory)
        : a(shared_address(memory)), b(a + FACTOR_BYTES), own(a + STAGES * 2 * FACTOR_BYTES), full(own + GROUPS * OWN_BYTES),
          empty(full.end(STAGES)), up_full(empty.end(STAGES)) {}

    void init() const {
        full.init(STAGES, 1);
        empty.init(STAGES, CLUSTER * WARPGROUP / WARP);
        up_full.init(GROUPS, 1);
        fence_barrier_init();
    }
};

// The block's tiles: number by number those of its cluster, which are CLUSTER tiles each, one below the other.
struct Tiles {
    int across, count, next, step;
    int row, column;  // of the tile at hand

    Tiles(int m, int n)
        : across((n + TILE - 1) / TILE), count((m + CLUSTER * TILE - 1) / (CLUSTER * TILE) * across), next(blockIdx.x / CLUSTER),
          step(gridDim.x / CLUSTER) {}

    bool more() const { return next < count; }

    bool take() {
        row = (next / across * CLUSTER + cluster_rank()) * TILE;
        column = next % across * TILE;
        const bool taken = more();
        next += step;
        return taken;
    }
};

// A thread: copies the factors of tile after tile.
template <bool BACKWARD>
void copy_factors(const Layout& at, const TensorMap& a_map, const TensorMap& b_map, Tiles tiles, int k) {
    const int rank = cluster_rank();
    unsigned step = 0;  // of all tiles
    while (tiles.take())
        for (int term = 0; term < k; term += DEPTH, step++) {
            const unsigned stage = step % STAGES, full = at.full[stage], place = stage * 2 * FACTOR_BYTES;
            wait(at.empty[stage], step / STAGES % 2 ^ 1);
            arrive_expecting(full, 2 * FACTOR_BYTES);
#pragma unroll
            for (int i = 0; i < TILE / BOX; i++)
                load_box(at.a + place + i * BOX_BYTES, a_map, full, term, 0, tiles.row + i * BOX, 0);
            const int column = tiles.column + rank * BOX;
            load_box_to((1 << CLUSTER) - 1, at.b + place + rank * BOX_BYTES, b_map, full, BACKWARD ? column : term, 0,
                        BACKWARD ? term : column, 0);
        }
}

// Elements 8 i .. of the sums of a half of the rows, two pairs of neighbours in each of two rows: of(value, e) becomes them.
template <typename F>
void change(float (&sum)[64], int i, F of) {
#pragma unroll
    for (int e = 0; e < 8; e++) sum[8 * i + e] = of(sum[8 * i + e], e);
}

inline float of_pair(unsigned pair, int odd) { return __uint_as_float(odd ? pair & 0xffff0000u : pair << 16); }

// A warpgroup: up and act of a tile, part after part, each of two places in turns.
inline void store_gelu(float (&sum)[2][64], unsigned own, const TensorMap& up_map, const TensorMap& act_map, const bf16* bias,
                       const Tiles& tiles, int n) {
    const int group = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int half = part / 2, side = part % 2, column = tiles.column + side * BOX;
        const unsigned up = own + part % 2 * 2 * BOX_BYTES, act = up + BOX_BYTES;
        unsigned shift[8] = {};  // the lane's pairs of columns of bias
        if (bias && column < n)
#pragma unroll
            for (int j = 0; j < 8; j++)
                shift[j] = *reinterpret_cast<const unsigned*>(bias + column + j * 8 + threadIdx.x % 4 * 2);
        if (thread == 0) wait_stores_read<1>();
        sync_threads(PLACES + group, WARPGROUP);  // the place is free
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int i = side * 4 + k;
            unsigned fragment[4];
            change(sum[half], i, [&](float x, int e) { return x + of_pair(shift[2 * k + e / 4], e % 2); });
            round_fragment(fragment, sum[half], i);
            store_fragment(up, k, fragment);
            change(sum[half], i, [&](float x, int) { return x * sigmoid_of_cubic(x); });
            round_fragment(fragment, sum[half], i);
            store_fragment(act, k, fragment);
        }
        fence_async();
        sync_threads(PLACES + group, WARPGROUP);  // both, written above by all, are copied by one
        if (thread == 0) {
            store_box(up_map, up, column, 0, tiles.row + half * BOX, 0);
            store_box(act_map, act, column, 0, tiles.row + half * BOX, 0);
            commit_stores();
        }
    }
}

// Of 2 COUNT sums a lane goes on with half, and its partner, so many lanes away, with the other.
template <int COUNT, int APART>
void share_sums(float (&sum)[32]) {
    const bool upper = threadIdx.x & APART;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float passed = __shfl_xor_sync(ALL_LANES, upper ? sum[i] : sum[i + COUNT], APART);
        sum[i] = (upper ? sum[i + COUNT] : sum[i]) + passed;
    }
}

// The sums over a warp's rows of a tile's columns; `partial`: its row, from the tile's first column on, `columns` of which there are.
inline void store_column_sums(const float (&sum)[2][64], float* partial, int columns) {
    const int lane = threadIdx.x % WARP;
    float column[32];  // 2 j and 2 j + 1: of columns 8 j + 2 t and the next
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int e = i / 2 * 4 + i % 2;
        column[i] = (sum[0][e] + sum[0][e + 2]) + (sum[1][e] + sum[1][e + 2]);
    }
    share_sums<16, 16>(column);
    share_sums<8, 8>(column);
    share_sums<4, 4>(column);
#pragma unroll
    for (int i = 0; i < 2; i++) {  // of 16 j, three bits of the lane's number have chosen two
        const int first = (lane / 16 * 8 + lane / 8 % 2 * 4 + lane / 4 % 2 * 2 + i) * 8 + lane % 4 * 2;
        if (first < columns) *reinterpret_cast<float2*>(partial + first) = {column[2 * i], column[2 * i + 1]};
    }
}

// A warpgroup: dup of a tile, in the place of up, which is there once `full` says so.
inline void store_gelu_gradient(float (&sum)[2][64], unsigned own, unsigned full, int phase, const TensorMap& dup_map,
                                float* partial, const Tiles& tiles, int m, int n) {
    const int group = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % WARP;
    const int row = thread / WARP * 16 + lane % 16;
    wait(full, phase);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int half = part / 2, side = part % 2;
        const unsigned place = own + part * BOX_BYTES;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            unsigned fragment[4];
            load_matrices(fragment, place + row * TILE_ROW_BYTES + ((2 * k + lane / 16) ^ lane % 8) * 16);
            change(sum[half], side * 4 + k, [&](float d, int e) { return d * gelu_slope(of_pair(fragment[e / 2], e % 2)); });
            round_fragment(fragment, sum[half], side * 4 + k);
            store_fragment(place, k, fragment);
        }
    }
    fence_async();
    sync_threads(PLACES + group, WARPGROUP);  // dup, written above by all, is copied by one
    if (thread == 0) {
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            store_box(dup_map, own + part * BOX_BYTES, tiles.column + part % 2 * BOX, 0, tiles.row + part / 2 * BOX, 0);
        commit_stores();
    }
    if (tiles.row < m) {
        const long long own_row = tiles.row / TILE * WARPGROUP / WARP + thread / WARP;
        store_column_sums(sum, partial + own_row * n + tiles.column, n - tiles.column);
    }
}

// A warpgroup: every GROUPS-th of the block's tiles.
template <bool BACKWARD>
void multiply(const Layout& at, const TensorMap& up_map, const TensorMap& out_map, const bf16* bias, float* partial, Tiles tiles,
              int m, int n, int k) {
    const int group = warp_number() * WARP / WARPGROUP, thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % WARP;
    const unsigned own = at.own + group * OWN_BYTES;
    const int steps = k / DEPTH, turn = max(steps - STAGES, 0);
    float sum[2][64] = {};
    unsigned step = 0;
    const auto release = [&](unsigned step) {
        if (lane < CLUSTER) arrive_at(at.empty[step % STAGES], lane);
    };
    for (int number = 0; tiles.take(); number++) {
        if (number % GROUPS != group) {
            step += steps;
            continue;
        }
        if (BACKWARD && thread == 0) {
            wait_stores_read();  // the last tile has left
            arrive_expecting(at.up_full[group], OWN_BYTES);
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                load_box(own + part * BOX_BYTES, up_map, at.up_full[group], tiles.column + part % 2 * BOX, 0,
                         tiles.row + part / 2 * BOX, 0);
        }
        if (number > 0) sync_threads(TURNS + group, GROUPS * WARPGROUP);
        for (int i = 0; i < steps; i++, step++) {
            const unsigned place = step % STAGES * 2 * FACTOR_BYTES;
            const unsigned long long a = tile_descriptor(at.a + place), b = tile_descriptor(at.b + place, BOX_BYTES);
            wait(at.full[step % STAGES], step / STAGES % 2);
            if (i == turn && tiles.more()) arrive_threads(TURNS + 1 - group, GROUPS * WARPGROUP);
            fence_products();
#pragma unroll
            for (int term = 0; term < DEPTH / 16; term++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    multiply_tiles<false, BACKWARD>(sum[half], advance(a, half * BOX_BYTES + term * 32),
                                                    advance(b, term * (BACKWARD ? 16 * TILE_ROW_BYTES : 32)), i + term > 0);
            commit_products();
            wait_products<1>();
            if (i > 0) release(step - 1);
        }
        wait_products<0>();
        hold(sum[0]);
        hold(sum[1]);
        release(step - 1);
        if constexpr (BACKWARD) {
            store_gelu_gradient(sum, own, at.up_full[group], number / GROUPS % 2, out_map, partial, tiles, m, n);
        } else {
            store_gelu(sum, own, up_map, out_map, bias, tiles, n);
        }
    }
    if (thread == 0) wait_stores();  // they read this block's memory
}

// Grid: clusters of CLUSTER blocks, one block a multiprocessor. up is what is stored (forward) or read (backward), out act or dup.
// bias is read forward and may be null; partial is written backward.
template <bool BACKWARD>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((GROUPS + 1) * WARPGROUP, 1)
    matmul_gelu(const __grid_constant__ TensorMap up_map, const __grid_constant__ TensorMap out_map,
                const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const bf16* bias,
                float* partial, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Layout at(memory);
    if (threadIdx.x == 0) at.init();
    sync_cluster();  // the barriers are ready, the other block's too
    const int warp = warp_number() - GROUPS * WARPGROUP / WARP;
    const Tiles tiles(m, n);
    if (warp < 0) {
        take_registers<232>();
        multiply<BACKWARD>(at, up_map, out_map, bias, partial, tiles, m, n, k);
    } else {
        give_registers<40>();
        if (warp == 0 && threadIdx.x % WARP == 0) copy_factors<BACKWARD>(at, a_map, b_map, tiles, k);
    }
    __syncwarp();    // one thread copied
    sync_cluster();  // until the other block, too, has done with this one's memory
}
