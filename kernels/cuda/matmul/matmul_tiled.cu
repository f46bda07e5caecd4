// The product of a linear layer in fp32: the plain tiled kernel.
//
//     out (m, n) (+)= op(a) (m, k) @ op(b) (k, n)
//
// Layout: a is (m, k) where A_ALONG_K, else (k, m); b is (n, k) where B_ALONG_K, else (k, n); all fp32.
// Work: a block of 16 x 16 threads owns a tile of TILE x TILE of out, DEPTH terms at a time from shared memory; a thread owns 8 x 8
//       elements of it in registers, four quarters of 4 x 4 that lie half a tile apart, so that a warp reads neighbouring banks.
// Precision: fp32, products and sums by fma. Determinism: each element's sum is one thread's, over k in order.
// Source: Volkov and Demmel 2008, "Benchmarking GPUs to tune dense linear algebra", for tiles in registers.

constexpr int TILE = 128, DEPTH = 8, SIDE = 16, THREADS = SIDE * SIDE, QUARTER = 4;
// Of a row of shared memory; 4 floats more than a tile so that rows differ in their banks, and remain aligned to 16 bytes.
constexpr int PITCH = TILE + 4;

// tile[k][outer] = op(factor)[first + outer][start + k], zero outside.
template <bool ALONG_K>
void load_tile(float (*tile)[PITCH], const float* factor, int first, int start, int outer_count, int k_count) {
#pragma unroll
    for (int i = 0; i < TILE * DEPTH / THREADS; i++) {
        const int index = threadIdx.x + i * THREADS;  // neighbouring threads read neighbouring addresses
        const int outer = ALONG_K ? index / DEPTH : index % TILE, k = ALONG_K ? index % DEPTH : index / TILE;
        const int row = first + outer, term = start + k;
        // Offsets pass 2^31 at 65536 rows of a 50304-wide vocabulary.
        const long long offset = ALONG_K ? (long long)row * k_count + term : (long long)term * outer_count + row;
        tile[k][outer] = row < outer_count && term < k_count ? factor[offset] : 0.0f;
    }
}

// Two quarters of a thread's rows or columns.
inline void fetch(float (&values)[2 * QUARTER], const float* row, int position) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 four = *reinterpret_cast<const float4*>(row + half * (TILE / 2) + position * QUARTER);
        values[half * QUARTER] = four.x, values[half * QUARTER + 1] = four.y;
        values[half * QUARTER + 2] = four.z, values[half * QUARTER + 3] = four.w;
    }
}

// Where in the tile a thread's i-th row or column lies.
inline int placed(int i, int position) { return i / QUARTER * (TILE / 2) + position * QUARTER + i % QUARTER; }

template <bool A_ALONG_K, bool B_ALONG_K>
__global__ void __launch_bounds__(THREADS) matmul_tiled(float* out, const float* a, const float* b, int m, int n, int k,
                                                        bool accumulate) {
    __shared__ __align__(16) float tile_a[DEPTH][PITCH], tile_b[DEPTH][PITCH];
    const int across = (n + TILE - 1) / TILE;
    const int first_row = blockIdx.x / across * TILE, first_column = blockIdx.x % across * TILE;
    const int down = threadIdx.x / SIDE, right = threadIdx.x % SIDE;
    float sums[2 * QUARTER][2 * QUARTER] = {};
    for (int start = 0; start < k; start += DEPTH) {
        __syncthreads();  // all have left the tiles of the step before
        load_tile<A_ALONG_K>(tile_a, a, first_row, start, m, k);
        load_tile<B_ALONG_K>(tile_b, b, first_column, start, n, k);
        __syncthreads();  // the tiles are whole
#pragma unroll
        for (int term = 0; term < DEPTH; term++) {
            float rows[2 * QUARTER], columns[2 * QUARTER];
            fetch(rows, tile_a[term], down);
            fetch(columns, tile_b[term], right);
#pragma unroll
            for (int i = 0; i < 2 * QUARTER; i++)
#pragma unroll
                for (int j = 0; j < 2 * QUARTER; j++) sums[i][j] = fmaf(rows[i], columns[j], sums[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * QUARTER; i++) {
        const int row = first_row + placed(i, down);
        if (row >= m) continue;
#pragma unroll
        for (int j = 0; j < 2 * QUARTER; j++) {
            const int column = first_column + placed(j, right);
            if (column >= n) continue;
            float* target = out + (long long)row * n + column;
            *target = accumulate ? *target + sums[i][j] : sums[i][j];
        }
    }
}
