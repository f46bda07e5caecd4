// Casts a bf16 matrix to FP8 (e4m3), one scale per tensor, and writes its transpose: operands of FP8 matmuls.
//
//     scale = amax / AMAX_TARGET, amax = max |x|        out = x / scale, transposed = out^T
//
//     IDENTITY       x = inp
//     GELU           x = gelu(inp), rounded to bf16 exactly as gelu.cu rounds it
//     GELU_BACKWARD  x = inp * gelu'(up), likewise; partial = column sums of x over a tile's rows, for dbias
//
// Layout: inp and out (rows, columns), bf16 and e4m3; transposed (columns, pitch), zeros past `rows`.
//         columns and pitch are multiples of 16, all arrays 16-byte aligned. scale fp32 (). amax int32 (),
//         the bits of a float. partial fp32 (gridDim.y, columns); sum_rows.cu adds its rows to dbias.
// Work: fp8_scale (current scaling): blocks stride over the matrix. The last block to finish writes scale.
//       fp8_cast: a block casts a tile of ROWS x COLUMNS and transposes it in shared memory. Reads and
//       transposed writes are then whole 128-byte lines. The cast also records amax.
//       fp8_rescale (delayed scaling): derives the next update's scales from the recorded amax values.
// Precision: x * (1 / scale), rounded once to nearest even, saturating at 448. NaN and infinity become NaN.
//            With current scaling they also make the scale non-finite, and with it the whole product NaN.
// Determinism: a maximum does not depend on the order; sums over rows have a fixed order.
// Source: Micikevicius et al. 2022, arXiv:2209.05433 (e4m3).
// Design: docs/kernels/fp8.md.

#include <cuda_fp8.h>

#include "activation.cuh"
#include "vectors.cuh"

using e4m3 = __nv_fp8_e4m3;

constexpr float AMAX_TARGET = 112.0f;  // a quarter of 448: the next update's amax may be 4 times as large
constexpr float MIN_AMAX = 0x1p-100f;  // gives a matrix of zeros a scale, and every scale a finite reciprocal
constexpr int SIZE = 8, SCALE_BLOCK = 512, CAST_BLOCK = 256, ROWS_PER_THREAD = 4;  // not tuned
enum { IDENTITY, GELU, GELU_BACKWARD };

inline float scale_from_amax(int amax_bits) {
    const float amax = __int_as_float(amax_bits);
    return (amax < MIN_AMAX ? MIN_AMAX : amax) / AMAX_TARGET;  // NaN stays: it compares false
}

// The largest magnitude of a vector's even elements (low half) and of its odd elements (high half), as bf16
// bits. Integer order is the order of magnitudes, with NaN above infinity.
inline unsigned vector_amax(const Packed<bf16, SIZE>& x) {
    unsigned amax = 0;
#pragma unroll
    for (int i = 0; i < x.WORDS; i++) amax = __vmaxu2(amax, x.word[i] & 0x7fff7fffu);
    return amax;
}

// The larger of the two bf16 halves, as the bits of a float.
inline unsigned as_float_bits(unsigned halves) { return max(halves & 0xffffu, halves >> 16) << 16; }

// Current scaling. vectors: number of SIZE-element vectors in inp. grid_state: {finished blocks, amax bits};
// both are zero before and after a launch.
__global__ void __launch_bounds__(SCALE_BLOCK)
    fp8_scale(float* scale, const bf16* inp, int* grid_state, long long vectors) {
    constexpr int LOADS_IN_FLIGHT = 4;  // vectors per thread; not tuned
    const long long step = (long long)gridDim.x * SCALE_BLOCK;
    const long long first = (long long)blockIdx.x * SCALE_BLOCK + threadIdx.x;
    unsigned amax = 0;
    for (long long i = first; i < vectors; i += step * LOADS_IN_FLIGHT) {
        Packed<bf16, SIZE> x[LOADS_IN_FLIGHT];
#pragma unroll
        for (int j = 0; j < LOADS_IN_FLIGHT; j++) {
            x[j].clear();
            if (i + j * step < vectors) x[j].load(inp + (i + j * step) * SIZE);
        }
#pragma unroll
        for (int j = 0; j < LOADS_IN_FLIGHT; j++) amax = __vmaxu2(amax, vector_amax(x[j]));
    }
    const auto larger = [](int a, int b) { return max(a, b); };
    const int amax_bits = block_reduce((int)as_float_bits(amax), larger, 0);
    if (threadIdx.x > 0) return;
    atomicMax(grid_state + 1, amax_bits);
    __threadfence();  // orders the maximum above before the block count below
    if (atomicAdd(grid_state, 1) < gridDim.x - 1) return;
    *scale = scale_from_amax(atomicExch(grid_state + 1, 0));
    grid_state[0] = 0;
}

// Delayed scaling, one thread per amax. scales (products, 3, 4): of weight, input and output gradient, each
// padded to 16 bytes for cuBLASLt. amax (products, 2): of input and output gradient. If the gradient norm is
// not finite, the update is skipped, and both arrays stay as they are.
__global__ void fp8_rescale(float* scales, int* amax, const double* grad_norm, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count || !isfinite(*grad_norm)) return;
    // amax is 0 if no token of the update counted in the loss. Then the old scale is the better guess.
    if (amax[i] > 0) scales[12 * (i / 2) + 4 * (1 + i % 2)] = scale_from_amax(amax[i]);
    amax[i] = 0;
}

// value(0) .. value(3) as e4m3, the first in the lowest byte. Saturates; NaN stays NaN.
template <typename F>
unsigned pack_e4m3x4(F value) {
    const auto pack_pair = [&](int j) {
        const float2 pair = make_float2(value(j), value(j + 1));
        return (unsigned)__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    };
    return pack_pair(0) | pack_pair(2) << 16;
}

// Column sums over the rows of the block's tile. A thread passes ROWS_PER_THREAD rows of one vector.
// All threads must call it.
template <int WARPS, int VECTORS>
void store_column_sums(float* to, const Packed<bf16, SIZE> (&x)[ROWS_PER_THREAD], int columns_left) {
    __shared__ float warp_partials[WARPS][VECTORS * SIZE];
    const int vector = threadIdx.x % VECTORS;
#pragma unroll
    for (int j = 0; j < SIZE; j++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) sum += x[i](j);
#pragma unroll
        for (int offset = VECTORS; offset < WARP; offset *= 2)
            sum += __shfl_xor_sync(ALL_LANES, sum, offset);
        if (threadIdx.x % WARP < VECTORS) warp_partials[threadIdx.x / WARP][vector * SIZE + j] = sum;
    }
    __syncthreads();  // RAW: other threads read the per-warp sums written above
    if (threadIdx.x >= VECTORS * SIZE || threadIdx.x >= columns_left) return;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += warp_partials[warp][threadIdx.x];
    to[threadIdx.x] = total;
}

// Grid: (column tiles, row tiles). amax and partial may each be null.
// TRANSFORM: IDENTITY, GELU or GELU_BACKWARD.
template <int TRANSFORM>
__global__ void __launch_bounds__(CAST_BLOCK)
    fp8_cast(e4m3* out, e4m3* transposed, const float* scale, int* amax, float* partial, const bf16* inp,
             const bf16* up, int rows, int columns, int pitch) {
    // The tile in shared memory is transposed: CHUNKS chunks of 16 bytes per column. Not tuned.
    constexpr int COLUMNS = 64, ROWS = CAST_BLOCK / (COLUMNS / SIZE) * ROWS_PER_THREAD;
    constexpr int CHUNK = 16, CHUNKS = ROWS / CHUNK, CHUNK_WORDS = CHUNK / sizeof(unsigned);
    __shared__ uint4 tile[COLUMNS][CHUNKS];
    const float inverse_scale = 1.0f / *scale;
    const int vector = threadIdx.x % (COLUMNS / SIZE), row_group = threadIdx.x / (COLUMNS / SIZE);
    const int column = blockIdx.x * COLUMNS + vector * SIZE;
    const int first_row = blockIdx.y * ROWS + row_group * ROWS_PER_THREAD;
    const long long offset = (long long)first_row * columns + column;
    const int rows_left = column < columns ? rows - first_row : 0;
    Packed<bf16, SIZE> x[ROWS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; i++) {
        x[i].clear();
        if (i < rows_left) x[i].load(inp + offset + (long long)i * columns);
    }
    if constexpr (TRANSFORM == GELU) {
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++)
            x[i].set([&](int j) { return x[i](j) * sigmoid_of_cubic(x[i](j)); });
    } else if constexpr (TRANSFORM == GELU_BACKWARD) {
        Packed<bf16, SIZE> up_rows[ROWS_PER_THREAD];
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) {
            up_rows[i].clear();
            if (i < rows_left) up_rows[i].load(up + offset + (long long)i * columns);
        }
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++)
            x[i].set([&](int j) { return x[i](j) * gelu_slope(up_rows[i](j)); });
        if (partial != nullptr) {
            const unsigned tile_column = blockIdx.x * COLUMNS;
            float* const to = partial + (long long)blockIdx.y * columns + tile_column;
            store_column_sums<CAST_BLOCK / WARP, COLUMNS / SIZE>(to, x, columns - tile_column);
        }
    }
    unsigned codes[ROWS_PER_THREAD][2];  // eight e4m3 per row
    unsigned thread_amax = 0;
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; i++) {
        thread_amax = __vmaxu2(thread_amax, vector_amax(x[i]));
#pragma unroll
        for (int half = 0; half < 2; half++)
            codes[i][half] = pack_e4m3x4([&](int j) {
                const float value = x[i](4 * half + j);
                // value - value is 0, or NaN for infinity. So infinity becomes NaN instead of saturating.
                return fmaf(value, inverse_scale, value - value);
            });
        if (i < rows_left)
            *reinterpret_cast<uint2*>(out + offset + (long long)i * columns) =
                make_uint2(codes[i][0], codes[i][1]);
    }
    if (amax != nullptr) {
        const unsigned warp_amax = __reduce_max_sync(ALL_LANES, as_float_bits(thread_amax));
        // Skip the atomic if the recorded amax is already as large, as it is for most warps. The L2 read may
        // be stale, which costs only a redundant atomic.
        if (threadIdx.x % WARP == 0 && (int)warp_amax > __ldcg(amax)) atomicMax(amax, (int)warp_amax);
    }
    // Chunks are swizzled by their column's vector: a warp's stores below then hit 32 different banks.
    uint4* const chunk_of_rows = &tile[vector * SIZE][(row_group / CHUNK_WORDS) ^ vector];
    unsigned* const target = reinterpret_cast<unsigned*>(chunk_of_rows) + row_group % CHUNK_WORDS;
    // Transpose 4 rows x 4 columns of bytes in registers, twice. A column's four bytes are one word.
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const unsigned row0 = codes[0][half], row1 = codes[1][half];
        const unsigned row2 = codes[2][half], row3 = codes[3][half];
        const unsigned a = __byte_perm(row0, row1, 0x5140), b = __byte_perm(row2, row3, 0x5140);
        const unsigned c = __byte_perm(row0, row1, 0x7362), d = __byte_perm(row2, row3, 0x7362);
        const unsigned column_word[4] = {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632),
                                         __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632)};
#pragma unroll
        for (int j = 0; j < 4; j++) target[(half * 4 + j) * CHUNKS * CHUNK_WORDS] = column_word[j];
    }
    __syncthreads();  // RAW: other threads read the tile written above
#pragma unroll
    for (int i = threadIdx.x; i < COLUMNS * CHUNKS; i += CAST_BLOCK) {
        const int tile_column = i / CHUNKS, chunk = i % CHUNKS;
        const int transposed_row = blockIdx.x * COLUMNS + tile_column;
        const int row = blockIdx.y * ROWS + chunk * CHUNK;
        if (transposed_row < columns && row < pitch)
            *reinterpret_cast<uint4*>(transposed + (long long)transposed_row * pitch + row) =
                tile[tile_column][chunk ^ (tile_column / SIZE)];
    }
}
