// A linear layer's product and the GELU beside it in one kernel, for Hopper. bf16.
//
//     forward     up  = a b^T (+ bias),       act = gelu(up)                     a (m, k) activations, b (n, k) weights
//     backward    dup = (a b) gelu'(up),      dbias = sum over rows of dup       a (m, k) gradients, b (k, n) weights
//
// Layout: a, b, up, act and dup row-major; up, act and dup (m, n). 64 divides n and k. bias (n,) bf16. partial (4 ceil(m / ROWS), n)
//         fp32: of dbias, a row for each warp of each tile, which columns.cu adds up.
// Work: a block stays on its multiprocessor and takes every so-manieth tile, ROWS x WIDTH of the results, along a row of tiles first.
//       Two warpgroups multiply in turns, a tile each, both from one queue of STAGES stages of DEPTH terms: so one rounds, applies
//       GELU and stores while the other keeps the tensor cores busy. In a third warpgroup one thread copies the factors. The
//       blocks of a cluster own tiles side by side: each copies half of the rows' factor, to both.
// Stage: free once both blocks' products have read it, as each block's copies go to both.
// Turns: a barrier tells a phase from the one before, not from an earlier one; so a warpgroup begins to wait for its first factors
//        when the other has seen those arrive that were in the same place before, all but its last STAGES: at step `turn`.
// Results leave, and `up` comes, part after part of 64 x 64, through PLACES tiles of hopper.cuh that a warpgroup has for itself.
// Precision: products of bf16 with fp32 sums; up and dup are rounded once, act is GELU's of up before rounding, dbias sums dup
//            before that.
// Determinism: each element's sum is over k in order, each of partial's over rows in a fixed order; no atomics.
// Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2 (GELU, with tanh); Shah et al. 2024, arXiv:2407.08608, section 3.1
//         (warpgroups in turns); PTX ISA, "Asynchronous warpgroup level matrix instructions".

#include "activation.cuh"
#include "hopper.cuh"

constexpr int ROWS = 128, DEPTH = 64, GROUPS = 2, CLUSTER = 2, PLACES = 4;
constexpr int BOX = 64, BOX_BYTES = BOX * TILE_ROW_BYTES;  // a tile of hopper.cuh: what is copied at a time
constexpr int HALVES = ROWS / BOX;                         // of a tile's rows
constexpr int OWN = 1, TURNS = OWN + GROUPS;               // hardware barriers, one a warpgroup: of its threads, of its turn

// Addresses in shared memory.
template <int WIDTH>
struct Layout {
    static constexpr int STAGES = WIDTH == 128 ? 5 : 4, SIDES = WIDTH / BOX, STAGE_BYTES = (HALVES + SIDES) * BOX_BYTES;
    unsigned factors, own;  // STAGES of a's and b's boxes; PLACES of each warpgroup
    Barriers full, empty, up_full;

    explicit Layout(const unsigned char* memory)
        : factors(shared_address(memory)), own(factors + STAGES * STAGE_BYTES), full(own + GROUPS * PLACES * BOX_BYTES),
          empty(full.end(STAGES)), up_full(empty.end(STAGES)) {}

    void init() const {
        full.init(STAGES, 1);
        empty.init(STAGES, CLUSTER * WARPGROUP / WARP);
        up_full.init(GROUPS * PLACES, 1);
        fence_mbarrier_init();
    }
};

// The block's tiles: number by number those of its cluster, which are CLUSTER tiles each, side by side.
template <int WIDTH>
struct Tiles {
    int across, count, next, step;
    int row, column;  // of the tile at hand

    Tiles(int m, int n)
        : across((n + CLUSTER * WIDTH - 1) / (CLUSTER * WIDTH)), count((m + ROWS - 1) / ROWS * across), next(blockIdx.x / CLUSTER),
          step(gridDim.x / CLUSTER) {}

    bool more() const { return next < count; }

    bool take() {
        row = next / across * ROWS;
        column = (next % across * CLUSTER + cluster_rank()) * WIDTH;
        const bool taken = more();
        next += step;
        return taken;
    }
};

// A thread: copies the factors of tile after tile.
template <bool BACKWARD, int WIDTH>
void copy_factors(const Layout<WIDTH>& at, const TensorMap& a_map, const TensorMap& b_map, Tiles<WIDTH> tiles, int k) {
    const int rank = cluster_rank();
    unsigned step = 0;  // of all tiles
    while (tiles.take())
        for (int term = 0; term < k; term += DEPTH, step++) {
            const unsigned stage = step % at.STAGES, full = at.full[stage], place = at.factors + stage * at.STAGE_BYTES;
            wait(at.empty[stage], step / at.STAGES % 2 ^ 1);
            arrive_expecting(full, at.STAGE_BYTES);
            tma_load_multicast((1 << CLUSTER) - 1, place + rank * BOX_BYTES, a_map, full, term, 0, tiles.row + rank * BOX, 0);
#pragma unroll
            for (int side = 0; side < at.SIDES; side++) {
                const int column = tiles.column + side * BOX;
                tma_load(place + (HALVES + side) * BOX_BYTES, b_map, full, BACKWARD ? column : term, 0, BACKWARD ? term : column, 0);
            }
        }
}

// Elements 8 i .. of the sums of a half of the rows, two pairs of neighbours in each of two rows: of(value, e) becomes them.
template <int COUNT, typename F>
void change(float (&sum)[COUNT], int i, F of) {
#pragma unroll
    for (int e = 0; e < 8; e++) sum[8 * i + e] = of(sum[8 * i + e], e);
}

inline float of_pair(unsigned pair, int odd) { return __uint_as_float(odd ? pair & 0xffff0000u : pair << 16); }

// A warpgroup: up and act of a tile, part after part, each of two pairs of places in turns.
template <int WIDTH>
void store_gelu(float (&sum)[HALVES][WIDTH / 2], unsigned own, const TensorMap& up_map, const TensorMap& act_map, const bf16* bias,
                const Tiles<WIDTH>& tiles, int n) {
    const int group = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
#pragma unroll
    for (int part = 0; part < HALVES * WIDTH / BOX; part++) {
        const int half = part % HALVES, side = part / HALVES, column = tiles.column + side * BOX;
        const unsigned up = own + part % 2 * 2 * BOX_BYTES, act = up + BOX_BYTES;
        unsigned shift[8] = {};  // the lane's pairs of columns of bias
        if (bias && column < n)
#pragma unroll
            for (int j = 0; j < 8; j++)
                shift[j] = *reinterpret_cast<const unsigned*>(bias + column + j * 8 + threadIdx.x % 4 * 2);
        if (thread == 0) bulk_wait_read<1>();
        named_barrier_sync(OWN + group, WARPGROUP);  // the places are free
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
        fence_async_proxy();
        named_barrier_sync(OWN + group, WARPGROUP);  // both, written above by all, are copied by one
        if (thread == 0) {
            tma_store(up_map, up, column, 0, tiles.row + half * BOX, 0);
            tma_store(act_map, act, column, 0, tiles.row + half * BOX, 0);
            bulk_commit();
        }
    }
}

// Of 2 COUNT sums a lane goes on with half, and its partner, so many lanes away, with the other.
template <int COUNT, int APART, int ALL>
void share_sums(float (&sum)[ALL]) {
    const bool upper = threadIdx.x & APART;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float passed = __shfl_xor_sync(ALL_LANES, upper ? sum[i] : sum[i + COUNT], APART);
        sum[i] = (upper ? sum[i + COUNT] : sum[i]) + passed;
    }
}

// The sums over a warp's rows of a tile's columns; `partial`: its row, from the tile's first column on, `columns` of which there are.
template <int WIDTH>
void store_column_sums(const float (&sum)[HALVES][WIDTH / 2], float* partial, int columns) {
    const int lane = threadIdx.x % WARP;
    float column[WIDTH / 4];  // 2 j and 2 j + 1: of columns 8 j + 2 t and the next
#pragma unroll
    for (int i = 0; i < WIDTH / 4; i++) {
        const int e = i / 2 * 4 + i % 2;
        column[i] = (sum[0][e] + sum[0][e + 2]) + (sum[1][e] + sum[1][e + 2]);
    }
    share_sums<WIDTH / 8, 16>(column);
    share_sums<WIDTH / 16, 8>(column);
    share_sums<WIDTH / 32, 4>(column);
    const int chosen = lane / 16 * (WIDTH / 16) + lane / 8 % 2 * (WIDTH / 32) + lane / 4 % 2 * (WIDTH / 64);  // the first of its j
#pragma unroll
    for (int i = 0; i < WIDTH / 64; i++) {
        const int first = (chosen + i) * 8 + lane % 4 * 2;
        if (first < columns) *reinterpret_cast<float2*>(partial + first) = {column[2 * i], column[2 * i + 1]};
    }
}

// One thread: start to copy part `part` of the tile's up to the place that is next, number `count` of all that came and will.
template <int WIDTH>
void load_up(const Layout<WIDTH>& at, const TensorMap& up_map, const Tiles<WIDTH>& tiles, int part, unsigned count) {
    const unsigned place = threadIdx.x / WARPGROUP * PLACES + count % PLACES;
    arrive_expecting(at.up_full[place], BOX_BYTES);
    tma_load(at.own + place * BOX_BYTES, up_map, at.up_full[place], tiles.column + part / HALVES * BOX, 0,
             tiles.row + part % HALVES * BOX, 0);
}

// A warpgroup: dup of a tile, part after part, in the place of up. count: parts of the tiles before.
template <int WIDTH>
void store_gelu_gradient(float (&sum)[HALVES][WIDTH / 2], const Layout<WIDTH>& at, const TensorMap& up_map, const TensorMap& dup_map,
                         const Tiles<WIDTH>& tiles, unsigned count) {
    constexpr int PARTS = HALVES * WIDTH / BOX;
    const int group = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % WARP;
    const int row = thread / WARP * 16 + lane % 16;
#pragma unroll
    for (int part = 0; part < PARTS; part++, count++) {
        const int half = part % HALVES, side = part / HALVES;
        const unsigned place = group * PLACES + count % PLACES, tile = at.own + place * BOX_BYTES;
        wait(at.up_full[place], count / PLACES % 2);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            unsigned fragment[4];
            ldmatrix_x4(fragment, tile + row * TILE_ROW_BYTES + ((2 * k + lane / 16) ^ lane % 8) * 16);
            change(sum[half], side * 4 + k, [&](float d, int e) { return d * gelu_slope(of_pair(fragment[e / 2], e % 2)); });
            round_fragment(fragment, sum[half], side * 4 + k);
            store_fragment(tile, k, fragment);
        }
        fence_async_proxy();
        named_barrier_sync(OWN + group, WARPGROUP);  // dup, written above by all, is copied by one
        if (thread == 0) {
            tma_store(dup_map, tile, tiles.column + side * BOX, 0, tiles.row + half * BOX, 0);
            bulk_commit();
            if (part > 0 && part - 1 + PLACES < PARTS) {
                bulk_wait_read<1>();  // the part before has left
                load_up(at, up_map, tiles, part - 1 + PLACES, count - 1 + PLACES);
            }
        }
    }
}

// A warpgroup: every GROUPS-th of the block's tiles.
template <bool BACKWARD, int WIDTH>
void multiply(const Layout<WIDTH>& at, const TensorMap& up_map, const TensorMap& out_map, const bf16* bias, float* partial,
              Tiles<WIDTH> tiles, int m, int n, int k) {
    constexpr int STAGES = Layout<WIDTH>::STAGES;
    const int group = warp_number() * WARP / WARPGROUP, thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % WARP;
    const int steps = k / DEPTH, turn = max(steps - STAGES, 0);
    float sum[HALVES][WIDTH / 2] = {};
    unsigned step = 0, count = 0;
    const auto release = [&](unsigned step) {
        if (lane < CLUSTER) arrive_remote(at.empty[step % STAGES], lane);
    };
    for (int number = 0; tiles.take(); number++) {
        if (number % GROUPS != group) {
            step += steps;
            continue;
        }
        if (BACKWARD && thread == 0) {
            bulk_wait_read();  // the last tile has left
#pragma unroll
            for (int part = 0; part < PLACES; part++) load_up(at, up_map, tiles, part, count + part);
        }
        if (number > 0) named_barrier_sync(TURNS + group, GROUPS * WARPGROUP);
        for (int i = 0; i < steps; i++, step++) {
            const unsigned place = at.factors + step % STAGES * at.STAGE_BYTES;
            const unsigned long long a = tile_descriptor(place), b = tile_descriptor(place + HALVES * BOX_BYTES, BOX_BYTES);
            wait(at.full[step % STAGES], step / STAGES % 2);
            if (i == turn && tiles.more()) named_barrier_arrive(TURNS + 1 - group, GROUPS * WARPGROUP);
            wgmma_fence();
#pragma unroll
            for (int term = 0; term < DEPTH / 16; term++)
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    wgmma_ss<false, BACKWARD>(sum[half], advance(a, half * BOX_BYTES + term * 32),
                                                    advance(b, term * (BACKWARD ? 16 * TILE_ROW_BYTES : 32)), i + term > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (i > 0) release(step - 1);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int half = 0; half < HALVES; half++) warpgroup_fence_operand(sum[half]);
        release(step - 1);
        if constexpr (BACKWARD) {
            store_gelu_gradient(sum, at, up_map, out_map, tiles, count);
            count += HALVES * WIDTH / BOX;
            const long long row = tiles.row / ROWS * WARPGROUP / WARP + thread / WARP;
            if (tiles.column < n) store_column_sums<WIDTH>(sum, partial + row * n + tiles.column, n - tiles.column);
        } else {
            store_gelu(sum, at.own + group * PLACES * BOX_BYTES, up_map, out_map, bias, tiles, n);
        }
    }
    if (thread == 0) bulk_wait();  // they read this block's memory
}

// Grid: clusters of CLUSTER blocks, one block a multiprocessor. up is what is stored (forward) or read (backward), out act or dup.
// bias is read forward and may be null; partial is written backward.
template <bool BACKWARD, int WIDTH>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((GROUPS + 1) * WARPGROUP, 1)
    matmul_gelu(const __grid_constant__ TensorMap up_map, const __grid_constant__ TensorMap out_map,
                const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const bf16* bias,
                float* partial, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Layout<WIDTH> at(memory);
    if (threadIdx.x == 0) at.init();
    sync_cluster();  // the barriers are ready, the other block's too
    const int warp = warp_number() - GROUPS * WARPGROUP / WARP;
    const Tiles<WIDTH> tiles(m, n);
    if (warp < 0) {
        warpgroup_reg_alloc<240>();
        multiply<BACKWARD>(at, up_map, out_map, bias, partial, tiles, m, n, k);
    } else {
        warpgroup_reg_dealloc<24>();
        if (warp == 0 && threadIdx.x % WARP == 0) copy_factors<BACKWARD>(at, a_map, b_map, tiles, k);
    }
    __syncwarp();    // one thread copied
    sync_cluster();  // until the other block, too, has done with this one's memory
}
