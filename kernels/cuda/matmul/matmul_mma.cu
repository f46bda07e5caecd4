// The product of a linear layer on tensor cores, in bf16.
//
//     out (m, n) (+)= op(a) (m, k) @ op(b) (k, n)
//
//     out       = inp @ weight^T        both factors hold a row's k side by side
//     dinp (+)= = dout @ weight         b holds n side by side
//     dweight  += dout^T @ inp          a holds m side by side, b n
//
// Layout: a is (m, k) where A_ALONG_K, else (k, m); b is (n, k) where B_ALONG_K, else (k, n); both bf16. out is bf16 or fp32.
// Work: a block of 4 warps owns a tile of TILE x TILE of out, a warp a quarter of it, 64 x 64, in registers: 4 x 8 tiles of the
//       instruction mma.m16n8k16. Terms come DEPTH at a time through STAGES buffers in shared memory, filled by asynchronous copies
//       STAGES - 1 steps ahead, so that the loads of a step run beside the products of the steps before. ldmatrix brings 16 x 16
//       elements from there to the registers that mma wants them in, transposed on the way where the sum does not run along a row.
//       Both factors' tiles, and both of their layouts, go through the same code: mma's B fragment is A's with halves exchanged.
//       Blocks go through out in bands of BAND tiles, so that those that run together share rows and columns in the L2 cache.
// Precision: factors bf16, their products exact, sums in fp32 by the tensor core, one rounding to the type of out.
// Determinism: each element's sum is one thread's, over k in order; no split sums, no atomics.
// Source: PTX ISA, "Matrix multiply-accumulate: mma, ldmatrix" for the fragments' layout; Kerr et al. 2017, "CUTLASS: fast linear
//         algebra in CUDA C++" for the hierarchy of tiles.

#include "mma.cuh"

constexpr int TILE = 128, DEPTH = 32, STAGES = 4, THREADS = 128;
constexpr int WARP_TILE = 64;                            // rows and columns of out that a warp owns
constexpr int ROW_BLOCKS = WARP_TILE / 16, COLUMN_PAIRS = WARP_TILE / 16;  // of 16 rows; of two times 8 columns
constexpr int CHUNK = 8;                                 // elements of 16 bytes: what is copied, placed and fetched at once
constexpr int CHUNKS = TILE * DEPTH / CHUNK;             // of a factor's tile
constexpr int COPIES = CHUNKS / THREADS;                 // a thread's
constexpr int BAND = 16;                                 // not tuned

// Four 8 x 8 matrices of a 16 x 16 fragment, two elements of each: (low, low), (high, low), (low, high), (high, high) in (m or n, k).
struct Fragment {
    unsigned part[4];
};

// A factor's tile, TILE (m or n, "outer") x DEPTH (k), as its rows lie in memory. A chunk's place in its row is exchanged with
// another's, by the row's number, so that the 8 rows of a matrix that ldmatrix fetches lie in different banks.
template <bool ALONG_K>
struct Tile {
    static constexpr int ROW_CHUNKS = (ALONG_K ? DEPTH : TILE) / CHUNK;
    static constexpr int ROWS_APART = THREADS / ROW_CHUNKS;  // between the rows of one thread's copies

    // In elements. The exchange has a period of 8 rows at most, so rows ROWS_APART apart, 8 or 32, keep a thread's place in the row.
    static int place(int row, int chunk) {
        const int exchanged = ALONG_K ? chunk ^ ((row / 2) % 4) : chunk ^ (row % 8);
        return (row * ROW_CHUNKS + exchanged) * CHUNK;
    }

    // The fragment whose first element is (outer, k), multiples of 16. Lane l gives the address of row l % 8 of matrix l / 8.
    static Fragment fetch(const bf16* tile, int outer, int k) {
        const int lane = threadIdx.x % WARP, low = lane % 16, high = lane / 16;
        Fragment f;
        if (ALONG_K) {
            ldmatrix_x4(f.part, shared_address(tile + place(outer + low, k / CHUNK + high)));
        } else {
            const int row = k + high * 8 + lane % 8, chunk = outer / CHUNK + low / 8;
            ldmatrix_x4_trans(f.part, shared_address(tile + place(row, chunk)));
        }
        return f;
    }
};

// A thread's share of a factor's tiles.
template <bool ALONG_K, bool WIDE>
struct Loader {
    using Shape = Tile<ALONG_K>;
    const bf16* source;  // of the thread's first chunk in the tile at k = 0
    long long row_size;  // elements; offsets pass 2^31 at 65536 rows of a 50304-wide vocabulary
    int outer, k;        // of the thread's first chunk in the tile at k = 0
    int outer_count, k_count, place;

    Loader(const bf16* factor, int first, int outer_count, int k_count) : outer_count(outer_count), k_count(k_count) {
        const int row = threadIdx.x / Shape::ROW_CHUNKS, chunk = threadIdx.x % Shape::ROW_CHUNKS;
        outer = first + (ALONG_K ? row : chunk * CHUNK);
        k = ALONG_K ? chunk * CHUNK : row;
        row_size = ALONG_K ? k_count : outer_count;
        source = factor + (ALONG_K ? outer * row_size + k : k * row_size + outer);
        place = Shape::place(row, chunk);
    }

    // The tile at k = `start`.
    void load(bf16* tile, int start) const {
        const bf16* from = source + (ALONG_K ? start : start * row_size);
#pragma unroll
        for (int copy = 0; copy < COPIES; copy++) {
            constexpr int APART = Shape::ROWS_APART;
            const int i = outer + (ALONG_K ? copy * APART : 0), j = k + start + (ALONG_K ? 0 : copy * APART);
            bf16* target = tile + place + copy * APART * Shape::ROW_CHUNKS * CHUNK;
            const bf16* chunk = from + copy * APART * row_size;
            const bool inside = i < outer_count && j < k_count;  // of the first element; where WIDE, of all
            if (WIDE) {
                cp_async(shared_address(target), chunk, inside);
            } else {
                const int left = !inside ? 0 : ALONG_K ? k_count - j : outer_count - i;
                for (int e = 0; e < CHUNK; e++) target[e] = e < left ? chunk[e] : from_float<bf16>(0.0f);
            }
        }
    }
};

// Two neighbours of a row of out, of which `left` exist.
template <bool WIDE, typename Out>
void store(Out* out, float first, float second, int left, bool accumulate) {
    if (WIDE) {  // n is even: both or none exist
        if (left <= 0) return;
        Vector<Out, 2>* pair = reinterpret_cast<Vector<Out, 2>*>(out);
        const Vector<Out, 2> before = accumulate ? *pair : Vector<Out, 2>{from_float<Out>(0.0f), from_float<Out>(0.0f)};
        *pair = {from_float<Out>(first + to_float(before.element[0])), from_float<Out>(second + to_float(before.element[1]))};
    } else {
        if (left > 0) out[0] = from_float<Out>(first + (accumulate ? to_float(out[0]) : 0.0f));
        if (left > 1) out[1] = from_float<Out>(second + (accumulate ? to_float(out[1]) : 0.0f));
    }
}

// WIDE: rows of a and b begin at multiples of 16 bytes, those of out at multiples of two elements.
template <typename Out, bool A_ALONG_K, bool B_ALONG_K, bool WIDE>
__global__ void __launch_bounds__(THREADS, 2) matmul_mma(Out* out, const bf16* a, const bf16* b, int m, int n, int k, bool accumulate) {
    extern __shared__ __align__(16) bf16 buffers[];  // (STAGES, a's and b's, TILE * DEPTH)
    const int across = (n + TILE - 1) / TILE, down = (m + TILE - 1) / TILE;
    const int band = blockIdx.x / (BAND * across), within = blockIdx.x % (BAND * across);
    const int height = min(BAND, down - band * BAND);
    const int first_row = (band * BAND + within % height) * TILE, first_column = within / height * TILE;

    const Loader<A_ALONG_K, WIDE> load_a(a, first_row, m, k);
    const Loader<B_ALONG_K, WIDE> load_b(b, first_column, n, k);
    const int steps = (k + DEPTH - 1) / DEPTH;
    const auto load = [&](int step) {
        if (step < steps) {
            bf16* buffer = buffers + step % STAGES * (2 * TILE * DEPTH);
            load_a.load(buffer, step * DEPTH);
            load_b.load(buffer + TILE * DEPTH, step * DEPTH);
        }
        cp_async_commit();  // also where there is nothing, so that each step is one commit
    };
    for (int step = 0; step < STAGES - 1; step++) load(step);

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int warp_row = warp / 2 * WARP_TILE, warp_column = warp % 2 * WARP_TILE;
    float sums[ROW_BLOCKS][2 * COLUMN_PAIRS][4] = {};
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // this step's tiles are whole for all, and all have left the buffer of the step before, filled next
        load(step + STAGES - 1);
        const bf16* tile_a = buffers + step % STAGES * (2 * TILE * DEPTH);
        const bf16* tile_b = tile_a + TILE * DEPTH;
#pragma unroll
        for (int inner = 0; inner < DEPTH; inner += 16) {
            Fragment left[ROW_BLOCKS], right[COLUMN_PAIRS];
#pragma unroll
            for (int i = 0; i < ROW_BLOCKS; i++) left[i] = Tile<A_ALONG_K>::fetch(tile_a, warp_row + 16 * i, inner);
#pragma unroll
            for (int j = 0; j < COLUMN_PAIRS; j++) right[j] = Tile<B_ALONG_K>::fetch(tile_b, warp_column + 16 * j, inner);
#pragma unroll
            for (int i = 0; i < ROW_BLOCKS; i++)
#pragma unroll
                for (int j = 0; j < 2 * COLUMN_PAIRS; j++)
                    mma_bf16(sums[i][j], left[i].part, right[j / 2].part[j % 2], right[j / 2].part[j % 2 + 2]);
        }
    }

    // Of a 16 x 8 tile a thread holds two neighbours in row lane / 4 and two 8 rows below.
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + warp_row + 16 * i + 8 * half + lane / 4;
            if (row >= m) continue;
#pragma unroll
            for (int j = 0; j < 2 * COLUMN_PAIRS; j++) {
                const int column = first_column + warp_column + 8 * j + lane % 4 * 2;
                Out* target = out + (long long)row * n + column;
                store<WIDE>(target, sums[i][j][2 * half], sums[i][j][2 * half + 1], n - column, accumulate);
            }
        }
}
