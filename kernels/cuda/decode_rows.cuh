// The input rows of decode_step.cu's products in shared memory, and the norms that make them.
#pragma once

#include "decode_model.cuh"

// Of a block. Single elements take more registers, and are no case to be fast in.
template <int SIZE>
constexpr int MOST_THREADS = SIZE == 1 ? 256 : 512;
constexpr int MOST_WARPS = MOST_THREADS<0> / WARP;

// Of the elements of a row that each warp has: their mean, their part of the row's variance about that mean, their share of the row,
// one by their count. All are 0 of a warp that has none.
template <int ROWS>
struct NormParts {
    alignas(16) float mean[ROWS][MOST_WARPS], variance[ROWS][MOST_WARPS], weight[MOST_WARPS], inverse_count[MOST_WARPS];
    float inverse_dim;

    // All threads; part: elements that a thread has at once.
    void set(int dim, int part) {
        for (int i = threadIdx.x; i < MOST_WARPS; i += blockDim.x) {
            int count = 0;
            for (int j = i * WARP * part; i < blockDim.x / WARP && j < dim; j += blockDim.x * part) count += min(WARP * part, dim - j);
            weight[i] = (float)count / dim;
            inverse_count[i] = count ? 1.0f / count : 0.0f;
            for (int r = 0; r < ROWS; r++) mean[r][i] = variance[r][i] = 0.0f;
        }
        if (threadIdx.x == 0) inverse_dim = 1.0f / dim;
    }
};

// What a block works on beside the stream of weights.
template <typename T, int ROWS>
struct Block {
    Shape shape[PRODUCTS];
    Begin<T> begin[MOST_WARPS * PRODUCTS];
    float of_warp[MOST_WARPS][2][ROWS];
    int held, position[ROWS], token[ROWS];  // what the cache holds, and of each row
    NormParts<ROWS> norm;
};

// Where element i of an input row is held: vectors of 8 are kept as two halves, each in a row of its own, so that neighbouring
// lanes' 16 bytes are neighbours and no two share a bank.
template <int SIZE>
unsigned held_at(unsigned i, unsigned inputs) {  // unsigned, so that divisions are shifts
    if constexpr (SIZE == 8) return i % 8 / 4 * (inputs / 2) + i / 8 * 4 + i % 4;
    else return i;
}

// PART floats to shared memory: store_floats is for global memory alone.
inline void store_shared(float* address, const float (&from)[1]) { *address = from[0]; }
inline void store_shared(float* address, const float (&from)[4]) {
    *reinterpret_cast<float4*>(address) = make_float4(from[0], from[1], from[2], from[3]);
}

inline float sum_of(const float (&x)[1]) { return x[0]; }
inline float sum_of(const float (&x)[4]) { return (x[0] + x[1]) + (x[2] + x[3]); }

// The vector that begins at element i, a multiple of SIZE.
template <int SIZE>
void load_held(float (&to)[SIZE], const float* row, unsigned i, unsigned inputs) {
    constexpr int PART = SIZE == 1 ? 1 : 4;
    const float* const first = row + (SIZE == 8 ? i / 2 : i);  // held_at, simplified
#pragma unroll
    for (int j = 0; j < SIZE; j += PART) {
        float part[PART];
        load_floats(part, first + j / PART * (inputs / 2));
#pragma unroll
        for (int k = 0; k < PART; k++) to[j + k] = part[k];
    }
}
template <int SIZE>
void hold(float* row, unsigned i, unsigned inputs, const float (&from)[SIZE]) {
    constexpr int PART = SIZE == 1 ? 1 : 4;
    float* const first = row + (SIZE == 8 ? i / 2 : i);
#pragma unroll
    for (int j = 0; j < SIZE; j += PART) {
        float part[PART];
#pragma unroll
        for (int k = 0; k < PART; k++) part[k] = from[j + k];
        store_shared(first + j / PART * (inputs / 2), part);
    }
}

// Mean and variance of a row from those of its warps' parts (Chan, Golub and LeVeque 1979), in the same order in every thread.
inline void combine(float& mean, float& variance, const float (&means)[MOST_WARPS], const float (&variances)[MOST_WARPS],
                    const float (&weights)[MOST_WARPS]) {
    float part[MOST_WARPS], weight[MOST_WARPS], sums[4] = {};
    load_floats(part, means);
    load_floats(weight, weights);
#pragma unroll
    for (int i = 0; i < MOST_WARPS; i++) sums[i % 4] = fmaf(part[i], weight[i], sums[i % 4]);
    mean = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    load_floats(sums, variances);
#pragma unroll
    for (int i = 4; i < MOST_WARPS; i += 4) {
        float more[4];
        load_floats(more, variances + i);
#pragma unroll
        for (int j = 0; j < 4; j++) sums[j] += more[j];
    }
#pragma unroll
    for (int i = 0; i < MOST_WARPS; i++) sums[i % 4] = fmaf(__fmul_rn(part[i] - mean, part[i] - mean), weight[i], sums[i % 4]);
    variance = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The scale and shift of a norm, PART elements from i on; the shift of one that has none is 0.
template <int PART>
struct NormPart {
    float scale[PART], shift[PART];
    void load(const float* weight, const float* bias, int i, int dim) {
#pragma unroll
        for (int j = 0; j < PART; j++) scale[j] = shift[j] = 0.0f;
        if (i < dim) load_floats(scale, weight + i);
        if (i < dim && bias) load_floats(shift, bias + i);
    }
};

// rows (ROWS, dim) = norm(what `load` gives of the stream, for which it waits); `raw` sees the rows before, if there is something for
// it to do. store(row, i, value) is called with each result. A thread reads no elements of the rows but those that it wrote; each
// warp takes mean and variance of its own, and each thread combines the warps'. Means are 0 where the norm does not centre.
template <int SIZE, typename T, int ROWS, typename Load, typename Raw, typename Store>
void make_norm(float* rows, Block<T, ROWS>& block, const float* weight, const float* bias, int dim, float eps, Load load,
               bool has_raw, Raw raw, Store store) {
    constexpr int PART = SIZE == 1 ? 1 : 4;
    const int begin = threadIdx.x * PART, step = blockDim.x * PART, warp = threadIdx.x / WARP;
    NormPart<PART> part;
    part.load(weight, bias, begin, dim);  // on its way while the block waits
    const auto held = [&](float (&x)[PART], int r, int i) { load_floats(x, rows + r * dim + held_at<SIZE>(i, dim)); };
    if (warp * WARP * PART < dim) {  // the whole warp or none of it
#pragma unroll 1  // rows side by side would take too many registers
        for (int r = 0; r < ROWS; r++) {
            float sum = 0.0f, squares = 0.0f, x[PART];
            for (int i = begin; i < dim; i += step) {
                load(x, r, i);
                store_shared(rows + r * dim + held_at<SIZE>(i, dim), x);
                sum += sum_of(x);
            }
            const float mean = bias ? __fmul_rn(warp_reduce(sum, Sum()), block.norm.inverse_count[warp]) : 0.0f;
            for (int i = begin; i < dim; i += step) {
                held(x, r, i);
#pragma unroll
                for (int j = 0; j < PART; j++) x[j] = __fmul_rn(x[j] - mean, x[j] - mean);
                squares += sum_of(x);
            }
            squares = warp_reduce(squares, Sum());
            if (threadIdx.x % WARP > 0) continue;
            block.norm.mean[r][warp] = mean;
            block.norm.variance[r][warp] = __fmul_rn(squares, block.norm.inverse_dim);
        }
    }
    __syncthreads();  // the warps' statistics, written above, are read by all, and maybe the rows
    if (has_raw) {
        raw();
        __syncthreads();  // the rows as they were are read no more
    }
    for (int i = begin; i < dim; i += step) {
        if (i > begin) part.load(weight, bias, i, dim);
#pragma unroll 1  // as above
        for (int r = 0; r < ROWS; r++) {
            float x[PART], mean, variance;
            combine(mean, variance, block.norm.mean[r], block.norm.variance[r], block.norm.weight);
            held(x, r, i);
            const float rstd = rsqrtf(variance + eps);
#pragma unroll
            for (int j = 0; j < PART; j++) {
                x[j] = fmaf(__fmul_rn(x[j] - mean, rstd), part.scale[j], part.shift[j]);
                store(r, i + j, x[j]);
            }
            store_shared(rows + r * dim + held_at<SIZE>(i, dim), x);
        }
    }
}
