// A matrix in 8-bit floating point, with one factor for all of it, and its transpose: what the products of FP8 read.
//
//     scale = max |x| / TOP                             out = x / scale, transposed = out^T
//
//     NUMBERS        x = inp
//     GELU           x = gelu(inp), rounded to bf16 as if gelu.cu had written it
//     GELU_BACKWARD  x = inp * gelu'(up), likewise; partial = its sums over the rows of a tile, those of the bias's gradient
//
// Layout: inp bf16 (rows, columns), 16 dividing columns; out likewise; transposed (columns, pitch), 16 dividing
//         pitch, zeros beyond the rows; all begin at multiples of 16 bytes. scale fp32 () and most int32 (), the bits of a magnitude.
// Work: fp8_scale, blocks stride over the matrix and meet in one integer maximum; the last to come writes the scale. fp8_cast, a block
//       owns a tile of ROWS x COLUMNS and turns it in shared memory, so that lines of 128 bytes are read and, transposed, written. It
//       notes the maximum for the next update, whose casts are then spared fp8_scale: fp8_rescale. Sums over a tile's rows, over the
//       warps' in order, go to its row of `partial` (gridDim.y, columns), which columns.cu adds up.
// Precision: the quotient by fp32's reciprocal of the scale; one rounding, to nearest, ties to even, at most to the largest number.
//            NaN and infinity become NaN, and make a scale of their own so, and all of the product NaN.
// Determinism: a maximum does not depend on the order.
// Source: Micikevicius et al. 2022, arXiv:2209.05433 (e4m3).

#include <cuda_fp8.h>

#include "activation.cuh"
#include "vectors.cuh"

using e4m3 = __nv_fp8_e4m3;

constexpr float TOP = 112.0f;  // of 448: the next update's largest magnitude may be four times as large
constexpr float SMALLEST = 0x1p-100f;  // so that zeros have a scale, and each scale a reciprocal
constexpr int SIZE = 8, SCALE_BLOCK = 512, CAST_BLOCK = 256, GROUP = 4;
enum { NUMBERS, GELU, GELU_BACKWARD };

inline float scale_of(int bits) {
    const float largest = __int_as_float(bits);
    return (largest < SMALLEST ? SMALLEST : largest) / TOP;  // NaN is not below
}

// Bits of a vector's largest magnitude, in each half of a word: in the order of the magnitudes, NaN above all.
inline unsigned most_of(const Packed<bf16, SIZE>& x) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < x.WORDS; i++) most = __vmaxu2(most, x.word[i] & 0x7fff7fffu);
    return most;
}
inline unsigned as_float_bits(unsigned both) { return max(both & 0xffffu, both >> 16) << 16; }

// vectors: of inp, of SIZE elements each. finished: blocks that are done, and the bits of the largest magnitude; zero before and after.
__global__ void __launch_bounds__(SCALE_BLOCK) fp8_scale(float* scale, const bf16* inp, int* finished, long long vectors) {
    constexpr int UNDER_WAY = 4;  // vectors that a thread waits for at once; not tuned
    const long long step = (long long)gridDim.x * SCALE_BLOCK;
    unsigned most = 0;
    for (long long i = (long long)blockIdx.x * SCALE_BLOCK + threadIdx.x; i < vectors; i += step * UNDER_WAY) {
        Packed<bf16, SIZE> x[UNDER_WAY];
#pragma unroll
        for (int j = 0; j < UNDER_WAY; j++) {
            x[j].clear();
            if (i + j * step < vectors) x[j].load(inp + (i + j * step) * SIZE);
        }
#pragma unroll
        for (int j = 0; j < UNDER_WAY; j++) most = __vmaxu2(most, most_of(x[j]));
    }
    const int bits = block_reduce((int)as_float_bits(most), [](int a, int b) { return max(a, b); }, 0);
    if (threadIdx.x > 0) return;
    atomicMax(finished + 1, bits);
    __threadfence();  // the maximum is there before the count says so
    if (atomicAdd(finished, 1) < gridDim.x - 1) return;
    *scale = scale_of(atomicExch(finished + 1, 0));
    finished[0] = 0;
}

// A product's scales are those of its weight, its input and its gradient, each the first of four numbers; most of the last two. A
// gradient whose norm is not finite is not applied.
__global__ void fp8_rescale(float* scales, int* most, const double* norm, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;  // of most
    if (i >= count || !isfinite(*norm)) return;
    // Zeros, as of an update none of whose tokens counts, say nothing of the next one.
    if (most[i] > 0) scales[12 * (i / 2) + 4 * (1 + i % 2)] = scale_of(most[i]);
    most[i] = 0;
}

// Four numbers' bytes, the first in the lowest.
template <typename F>
unsigned four(F of) {
    const auto pair = [&](int j) {
        return (unsigned)__nv_cvt_float2_to_fp8x2(make_float2(of(j), of(j + 1)), __NV_SATFINITE, __NV_E4M3);
    };
    return pair(0) | pair(2) << 16;
}

// Added up over a block's rows, of which a thread has those of a group: all threads must call it.
template <int WARPS, int VECTORS>
void sum_rows(float* to, const Packed<bf16, SIZE> (&x)[GROUP], int columns_left) {
    __shared__ float warp_partials[WARPS][VECTORS * SIZE];
    const int vector = threadIdx.x % VECTORS;
#pragma unroll
    for (int j = 0; j < SIZE; j++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUP; i++) sum += x[i](j);
#pragma unroll
        for (int offset = VECTORS; offset < WARP; offset *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
        if (threadIdx.x % WARP < VECTORS) warp_partials[threadIdx.x / WARP][vector * SIZE + j] = sum;
    }
    __syncthreads();  // the warps' sums, written above, are read below by others
    if (threadIdx.x >= VECTORS * SIZE || threadIdx.x >= columns_left) return;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += warp_partials[warp][threadIdx.x];
    to[threadIdx.x] = total;
}

// grid: (tiles of columns, of rows). most and partial may each be null. OF: what is cast.
template <int OF>
__global__ void __launch_bounds__(CAST_BLOCK)
    fp8_cast(e4m3* out, e4m3* transposed, const float* scale, int* most, float* partial, const bf16* inp, const bf16* up, int rows, int columns,
             int pitch) {
    // A thread casts GROUP rows of a vector; of its tile each column's bytes lie in CHUNKS of 16. Not tuned.
    constexpr int COLUMNS = 64, ROWS = CAST_BLOCK / (COLUMNS / SIZE) * GROUP, CHUNK = 16, CHUNKS = ROWS / CHUNK;
    constexpr int WORDS = CHUNK / sizeof(unsigned);
    __shared__ uint4 tile[COLUMNS][CHUNKS];
    const float inverse = 1.0f / *scale;
    const int vector = threadIdx.x % (COLUMNS / SIZE), group = threadIdx.x / (COLUMNS / SIZE);
    const int column = blockIdx.x * COLUMNS + vector * SIZE, first = blockIdx.y * ROWS + group * GROUP;
    const long long place = (long long)first * columns + column;
    const int inside = column < columns ? rows - first : 0;  // rows of the group, or more
    Packed<bf16, SIZE> x[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        x[i].clear();
        if (i < inside) x[i].load(inp + place + (long long)i * columns);
    }
    if constexpr (OF == GELU) {
#pragma unroll
        for (int i = 0; i < GROUP; i++) x[i].set([&](int j) { return x[i](j) * sigmoid_of_cubic(x[i](j)); });
    } else if constexpr (OF == GELU_BACKWARD) {
        Packed<bf16, SIZE> at[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            at[i].clear();
            if (i < inside) at[i].load(up + place + (long long)i * columns);
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++) x[i].set([&](int j) { return x[i](j) * gelu_slope(at[i](j)); });
        if (partial != nullptr)
            sum_rows<CAST_BLOCK / WARP, COLUMNS / SIZE>(partial + (long long)blockIdx.y * columns + blockIdx.x * COLUMNS, x,
                                                        columns - blockIdx.x * COLUMNS);
    }
    unsigned word[GROUP][2], largest = 0;  // of each row; of all
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        largest = __vmaxu2(largest, most_of(x[i]));
#pragma unroll
        for (int half = 0; half < 2; half++)
            word[i][half] = four([&](int j) {
                const float value = x[i](4 * half + j);
                return fmaf(value, inverse, value - value);  // the difference is 0, or NaN: infinity is not to become a number
            });
        if (i < inside)
            *reinterpret_cast<uint2*>(out + place + (long long)i * columns) = make_uint2(word[i][0], word[i][1]);
    }
    if (most != nullptr) {
        const unsigned bits = __reduce_max_sync(ALL_LANES, as_float_bits(largest));
        // Most warps find what is there as large: read in the second-level cache, older than it is at worst.
        if (threadIdx.x % WARP == 0 && (int)bits > __ldcg(most)) atomicMax(most, (int)bits);
    }
    // Chunks are exchanged by their columns' vector: the words that a warp writes at once then lie in 32 banks.
    auto* const to = reinterpret_cast<unsigned*>(&tile[vector * SIZE][(group / WORDS) ^ vector]) + group % WORDS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const unsigned a = __byte_perm(word[0][half], word[1][half], 0x5140), b = __byte_perm(word[2][half], word[3][half], 0x5140);
        const unsigned c = __byte_perm(word[0][half], word[1][half], 0x7362), d = __byte_perm(word[2][half], word[3][half], 0x7362);
        const unsigned of_column[4] = {
            __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632)};
#pragma unroll
        for (int j = 0; j < 4; j++) to[(half * 4 + j) * CHUNKS * WORDS] = of_column[j];
    }
    __syncthreads();  // the tile, written above, is read below by other threads
#pragma unroll
    for (int i = threadIdx.x; i < COLUMNS * CHUNKS; i += CAST_BLOCK) {
        const int of_tile = i / CHUNKS, chunk = i % CHUNKS;
        const int into = blockIdx.x * COLUMNS + of_tile, row = blockIdx.y * ROWS + chunk * CHUNK;
        if (into < columns && row < pitch)
            *reinterpret_cast<uint4*>(transposed + (long long)into * pitch + row) = tile[of_tile][chunk ^ (of_tile / SIZE)];
    }
}
