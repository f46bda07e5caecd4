// A linear layer's matmul in fp32 on CUDA cores: the classic kernel with shared memory and register tiles.
//
//     out (m, n) (+)= op(a) (m, k) @ op(b) (k, n)
//
// Layout: a is (m, k) if A_K_MAJOR, else (k, m); b is (n, k) if B_K_MAJOR, else (k, n); all row-major fp32.
// Work: block: 16 x 16 threads compute a TILE x TILE tile of out, TILE_K terms at a time from shared memory.
//       thread: 8 x 8 elements in registers, four QUARTER x QUARTER quarters half a tile apart. A warp then
//       reads neighbouring banks.
// Precision: fp32 fma. Determinism: one thread sums each element over k in order.
// Source: Volkov and Demmel 2008, "Benchmarking GPUs to tune dense linear algebra" (register tiles).

// Not tuned.
constexpr int TILE = 128, TILE_K = 8, SIDE = 16, THREADS = SIDE * SIDE, QUARTER = 4;
// Row pitch in shared memory. Padded by 4 floats, so rows start at different banks and stay 16-byte aligned.
constexpr int PITCH = TILE + 4;

// tile[k][outer] = op(operand)[first + outer][k_start + k], zero outside of the operand.
// outer: an index along m of a or along n of b.
template <bool K_MAJOR>
void load_tile(float (*tile)[PITCH], const float* operand, int first, int k_start, int outer_count,
               int k_count) {
#pragma unroll
    for (int i = 0; i < TILE * TILE_K / THREADS; i++) {
        const int index = threadIdx.x + i * THREADS;  // neighbouring threads read neighbouring addresses
        const int outer = K_MAJOR ? index / TILE_K : index % TILE;
        const int k = K_MAJOR ? index % TILE_K : index / TILE;
        const int row = first + outer, term = k_start + k;
        // 64 bits: 65536 rows of a 50304-wide vocabulary exceed 2^31 elements.
        const long long offset =
            K_MAJOR ? (long long)row * k_count + term : (long long)term * outer_count + row;
        tile[k][outer] = row < outer_count && term < k_count ? operand[offset] : 0.0f;
    }
}

// Load the two quarters of a thread's rows or columns from one row of a tile. `position`: 0 .. SIDE - 1.
inline void load_fragment(float (&values)[2 * QUARTER], const float* tile_row, int position) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float* from = tile_row + half * (TILE / 2) + position * QUARTER;
        const float4 quarter = *reinterpret_cast<const float4*>(from);
        values[half * QUARTER] = quarter.x, values[half * QUARTER + 1] = quarter.y;
        values[half * QUARTER + 2] = quarter.z, values[half * QUARTER + 3] = quarter.w;
    }
}

// The row or column, within the tile, of a thread's i-th row or column.
inline int tile_index(int i, int position) {
    return i / QUARTER * (TILE / 2) + position * QUARTER + i % QUARTER;
}

template <bool A_K_MAJOR, bool B_K_MAJOR>
__global__ void __launch_bounds__(THREADS)
    matmul_tiled(float* out, const float* a, const float* b, int m, int n, int k, bool accumulate) {
    __shared__ __align__(16) float tile_a[TILE_K][PITCH], tile_b[TILE_K][PITCH];
    const int n_tiles = (n + TILE - 1) / TILE;
    const int first_row = blockIdx.x / n_tiles * TILE, first_column = blockIdx.x % n_tiles * TILE;
    const int thread_row = threadIdx.x / SIDE, thread_column = threadIdx.x % SIDE;
    float acc[2 * QUARTER][2 * QUARTER] = {};
    for (int k_start = 0; k_start < k; k_start += TILE_K) {
        __syncthreads();  // WAR: all threads have read the previous step's tiles
        load_tile<A_K_MAJOR>(tile_a, a, first_row, k_start, m, k);
        load_tile<B_K_MAJOR>(tile_b, b, first_column, k_start, n, k);
        __syncthreads();  // RAW: the tiles are complete
#pragma unroll
        for (int term = 0; term < TILE_K; term++) {
            float a_frag[2 * QUARTER], b_frag[2 * QUARTER];
            load_fragment(a_frag, tile_a[term], thread_row);
            load_fragment(b_frag, tile_b[term], thread_column);
#pragma unroll
            for (int i = 0; i < 2 * QUARTER; i++)
#pragma unroll
                for (int j = 0; j < 2 * QUARTER; j++) acc[i][j] = fmaf(a_frag[i], b_frag[j], acc[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * QUARTER; i++) {
        const int row = first_row + tile_index(i, thread_row);
        if (row >= m) continue;
#pragma unroll
        for (int j = 0; j < 2 * QUARTER; j++) {
            const int column = first_column + tile_index(j, thread_column);
            if (column >= n) continue;
            float* target = out + (long long)row * n + column;
            *target = accumulate ? *target + acc[i][j] : acc[i][j];
        }
    }
}
