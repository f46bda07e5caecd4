// A linear layer's matmul on tensor cores (mma.sync), in bf16.
//
//     out (m, n) (+)= op(a) (m, k) @ op(b) (k, n)
//
//     out       = inp @ weight^T        a and b are K-major
//     dinp (+)= = dout @ weight         a is K-major, b is N-major
//     dweight  += dout^T @ inp          a is M-major, b is N-major
//
// Layout: a is (m, k) if A_K_MAJOR, else (k, m); b is (n, k) if B_K_MAJOR, else (k, n); all row-major bf16.
//         out is bf16 or fp32.
// Work: block: 4 warps compute a TILE x TILE tile of out.
//       warp: a 64 x 64 quarter in registers, 4 x 8 tiles of mma.m16n8k16.
//       thread: 1/128 of the copies (cp.async) of each operand tile. The software pipeline has STAGES stages
//       of TILE_K terms; copies run STAGES - 1 steps ahead.
//       ldmatrix loads fragments; it transposes those of M- or N-major operands. The same code serves a and
//       b: the B fragments of two n8 tiles are one A fragment in another order.
//       Blocks are rasterized in groups of GROUP_M row tiles: concurrent blocks share rows and columns in L2.
// Precision: bf16 operands, fp32 accumulation by the tensor cores, one rounding to the type of out.
// Determinism: one thread sums each element over k in order; no split-K, no atomics.
// Source: PTX ISA, "Matrix multiply-accumulate: mma, ldmatrix" (fragment layout); Kerr et al. 2017,
//         "CUTLASS: fast linear algebra in CUDA C++" (tile hierarchy).

#include "mma.cuh"

// GROUP_M is not tuned. On an H200 the kernel has 0.32 to 0.39 of the speed of cuBLASLt, which uses wgmma.
// For weight gradients it has 0.11 to 0.31: without split-K few tiles leave SMs idle.
constexpr int TILE = 128, TILE_K = 32, STAGES = 4, THREADS = 128, GROUP_M = 16;
constexpr int WARP_TILE = 64;                  // rows and columns of out per warp
constexpr int M_FRAGMENTS = WARP_TILE / 16;    // of 16 rows
constexpr int N_FRAGMENTS = WARP_TILE / 16;    // of 16 columns, two n8 tiles
constexpr int CHUNK = 8;                       // elements in 16 bytes: the unit of copies and swizzle
constexpr int CHUNKS = TILE * TILE_K / CHUNK;  // per operand tile
constexpr int COPIES = CHUNKS / THREADS;       // per thread and operand tile

// A 16 x 16 fragment as four 8 x 8 matrices, two elements of each per lane. Their (m or n, k) halves are
// (low, low), (high, low), (low, high), (high, high).
struct Fragment {
    unsigned matrix[4];
};

// An operand tile in shared memory, TILE (m or n, the "outer" extent) x TILE_K, in the row order of global
// memory. Chunks are swizzled by their row, so the 8 rows of a matrix that ldmatrix reads lie in different
// banks.
template <bool K_MAJOR>
struct OperandTile {
    static constexpr int ROW_CHUNKS = (K_MAJOR ? TILE_K : TILE) / CHUNK;
    static constexpr int ROW_STEP = THREADS / ROW_CHUNKS;  // from one of a thread's copies to its next

    // Element offset of a chunk. The swizzle's period divides ROW_STEP (8 or 32), so all of a thread's
    // copies go to the same chunk of their rows.
    static int offset(int row, int chunk) {
        const int swizzled = K_MAJOR ? chunk ^ ((row / 2) % 4) : chunk ^ (row % 8);
        return (row * ROW_CHUNKS + swizzled) * CHUNK;
    }

    // The fragment at (outer, k), multiples of 16. Lane l passes the address of row l % 8 of matrix l / 8.
    static Fragment load_fragment(const bf16* tile, int outer, int k) {
        const int lane = threadIdx.x % WARP, low = lane % 16, high = lane / 16;
        Fragment f;
        if (K_MAJOR) {
            ldmatrix_x4(f.matrix, shared_address(tile + offset(outer + low, k / CHUNK + high)));
        } else {
            const int row = k + high * 8 + lane % 8, chunk = outer / CHUNK + low / 8;
            ldmatrix_x4_trans(f.matrix, shared_address(tile + offset(row, chunk)));
        }
        return f;
    }
};

// A thread's copies of one operand's tiles from global to shared memory.
template <bool K_MAJOR, bool VECTORIZED>
struct OperandLoader {
    using Tile = OperandTile<K_MAJOR>;
    const bf16* source;  // the thread's first chunk of the tile at k = 0
    long long row_size;  // elements. 64 bits: 65536 rows of a 50304-wide vocabulary exceed 2^31 elements.
    int outer, k;        // of that chunk
    int outer_count, k_count, target_offset;

    OperandLoader(const bf16* operand, int first, int outer_count, int k_count)
        : outer_count(outer_count), k_count(k_count) {
        const int row = threadIdx.x / Tile::ROW_CHUNKS, chunk = threadIdx.x % Tile::ROW_CHUNKS;
        outer = first + (K_MAJOR ? row : chunk * CHUNK);
        k = K_MAJOR ? chunk * CHUNK : row;
        row_size = K_MAJOR ? k_count : outer_count;
        source = operand + (K_MAJOR ? outer * row_size + k : k * row_size + outer);
        target_offset = Tile::offset(row, chunk);
    }

    // Load the tile at k = k_start. Elements outside of the operand become zeros.
    void load(bf16* tile, int k_start) const {
        const bf16* from = source + (K_MAJOR ? k_start : k_start * row_size);
#pragma unroll
        for (int copy = 0; copy < COPIES; copy++) {
            constexpr int STEP = Tile::ROW_STEP;
            const int i = outer + (K_MAJOR ? copy * STEP : 0), j = k + k_start + (K_MAJOR ? 0 : copy * STEP);
            bf16* target = tile + target_offset + copy * STEP * Tile::ROW_CHUNKS * CHUNK;
            const bf16* chunk = from + copy * STEP * row_size;
            const bool inside = i < outer_count && j < k_count;  // the first element; if VECTORIZED, all
            if (VECTORIZED) {
                cp_async(shared_address(target), chunk, inside);
            } else {
                const int left = !inside ? 0 : K_MAJOR ? k_count - j : outer_count - i;
                for (int e = 0; e < CHUNK; e++) target[e] = e < left ? chunk[e] : from_float<bf16>(0.0f);
            }
        }
    }
};

// Store two neighbouring elements of a row of out. `columns_left`: columns from the first of them to the
// row's end.
template <bool VECTORIZED, typename Out>
void store(Out* out, float first, float second, int columns_left, bool accumulate) {
    if (VECTORIZED) {  // n is even, so both or neither exist
        if (columns_left <= 0) return;
        Vector<Out, 2>* pair = reinterpret_cast<Vector<Out, 2>*>(out);
        const Vector<Out, 2> old =
            accumulate ? *pair : Vector<Out, 2>{from_float<Out>(0.0f), from_float<Out>(0.0f)};
        *pair = {from_float<Out>(first + to_float(old.element[0])),
                 from_float<Out>(second + to_float(old.element[1]))};
    } else {
        if (columns_left > 0) out[0] = from_float<Out>(first + (accumulate ? to_float(out[0]) : 0.0f));
        if (columns_left > 1) out[1] = from_float<Out>(second + (accumulate ? to_float(out[1]) : 0.0f));
    }
}

// VECTORIZED: rows of a and b begin at multiples of 16 bytes, rows of out at multiples of two elements.
template <typename Out, bool A_K_MAJOR, bool B_K_MAJOR, bool VECTORIZED>
__global__ void __launch_bounds__(THREADS, 2)
    matmul_mma(Out* out, const bf16* a, const bf16* b, int m, int n, int k, bool accumulate) {
    extern __shared__ __align__(16) bf16 stages[];  // (STAGES, a and b, TILE * TILE_K)
    const int n_tiles = (n + TILE - 1) / TILE, m_tiles = (m + TILE - 1) / TILE;
    const int group = blockIdx.x / (GROUP_M * n_tiles), within = blockIdx.x % (GROUP_M * n_tiles);
    const int height = min(GROUP_M, m_tiles - group * GROUP_M);
    const int first_row = (group * GROUP_M + within % height) * TILE, first_column = within / height * TILE;

    const OperandLoader<A_K_MAJOR, VECTORIZED> load_a(a, first_row, m, k);
    const OperandLoader<B_K_MAJOR, VECTORIZED> load_b(b, first_column, n, k);
    const int steps = (k + TILE_K - 1) / TILE_K;
    const auto load = [&](int step) {
        if (step < steps) {
            bf16* stage = stages + step % STAGES * (2 * TILE * TILE_K);
            load_a.load(stage, step * TILE_K);
            load_b.load(stage + TILE * TILE_K, step * TILE_K);
        }
        cp_async_commit();  // even if empty: the waits count one group per step
    };
    for (int step = 0; step < STAGES - 1; step++) load(step);

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int warp_row = warp / 2 * WARP_TILE, warp_column = warp % 2 * WARP_TILE;
    float acc[M_FRAGMENTS][2 * N_FRAGMENTS][4] = {};
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        // RAW: all threads' copies of this step have arrived. WAR: all warps have read the stage of the
        // previous step, which the load below overwrites.
        __syncthreads();
        load(step + STAGES - 1);
        const bf16* tile_a = stages + step % STAGES * (2 * TILE * TILE_K);
        const bf16* tile_b = tile_a + TILE * TILE_K;
#pragma unroll
        for (int k16 = 0; k16 < TILE_K; k16 += 16) {
            Fragment a_frag[M_FRAGMENTS], b_frag[N_FRAGMENTS];
#pragma unroll
            for (int i = 0; i < M_FRAGMENTS; i++)
                a_frag[i] = OperandTile<A_K_MAJOR>::load_fragment(tile_a, warp_row + 16 * i, k16);
#pragma unroll
            for (int j = 0; j < N_FRAGMENTS; j++)
                b_frag[j] = OperandTile<B_K_MAJOR>::load_fragment(tile_b, warp_column + 16 * j, k16);
#pragma unroll
            for (int i = 0; i < M_FRAGMENTS; i++)
#pragma unroll
                for (int j = 0; j < 2 * N_FRAGMENTS; j++)
                    mma_bf16(acc[i][j], a_frag[i].matrix, b_frag[j / 2].matrix[j % 2],
                             b_frag[j / 2].matrix[j % 2 + 2]);
        }
    }

    // Of a 16 x 8 tile a lane holds two neighbouring elements of row lane / 4 and two of row lane / 4 + 8.
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + warp_row + 16 * i + 8 * half + lane / 4;
            if (row >= m) continue;
#pragma unroll
            for (int j = 0; j < 2 * N_FRAGMENTS; j++) {
                const int column = first_column + warp_column + 8 * j + lane % 4 * 2;
                Out* target = out + (long long)row * n + column;
                const float first = acc[i][j][2 * half], second = acc[i][j][2 * half + 1];
                store<VECTORIZED>(target, first, second, n - column, accumulate);
            }
        }
}
