// The input rows of decode_step.cu's products in shared memory, and the norms that make them.
#pragma once

#include "decode_model.cuh"

// Of a block. Single elements take more registers, and are no case to be fast in.
template <int SIZE>
constexpr int MOST_THREADS = SIZE == 1 ? 256 : 512;
constexpr int MOST_WARPS = MOST_THREADS<0> / WARP;

// What a block works on beside the stream of weights.
template <int ROWS>
struct Block {
    Shape shape[PRODUCTS];
    float mean[ROWS], rstd[ROWS];
    float of_warp[MOST_WARPS][2][ROWS];
};

// Where element i of an input row is held: vectors of 8 are kept as two halves, each in a row of its own, so that neighbouring
// lanes' 16 bytes are neighbours and no two share a bank.
template <int SIZE>
int held_at(int i, int inputs) {
    if constexpr (SIZE == 8) return i % 8 / 4 * (inputs / 2) + i / 8 * 4 + i % 4;
    else return i;
}

// PART floats to shared memory: store_floats is for global memory alone.
inline void store_shared(float* address, const float (&from)[1]) { *address = from[0]; }
inline void store_shared(float* address, const float (&from)[4]) {
    *reinterpret_cast<float4*>(address) = make_float4(from[0], from[1], from[2], from[3]);
}

// The vector that begins at element i.
template <int SIZE>
void load_held(float (&to)[SIZE], const float* row, int i, int inputs) {
    constexpr int PART = SIZE == 1 ? 1 : 4;
#pragma unroll
    for (int j = 0; j < SIZE; j += PART) {
        float part[PART];
        load_floats(part, row + held_at<SIZE>(i, inputs) + j / PART * (inputs / 2));
#pragma unroll
        for (int k = 0; k < PART; k++) to[j + k] = part[k];
    }
}
template <int SIZE>
void hold(float* row, int i, int inputs, const float (&from)[SIZE]) {
    constexpr int PART = SIZE == 1 ? 1 : 4;
#pragma unroll
    for (int j = 0; j < SIZE; j += PART) {
        float part[PART];
#pragma unroll
        for (int k = 0; k < PART; k++) part[k] = from[j + k];
        store_shared(row + held_at<SIZE>(i, inputs) + j / PART * (inputs / 2), part);
    }
}

// mean is 0 where the norm does not centre. All lanes of a warp; the order of the elements is that in which they are held.
template <int PART>
void statistics(float& mean, float& rstd, const float* row, int dim, bool centred, float eps) {
    const auto sum_of = [&](auto term) {
        float sums[PART] = {}, sum = 0.0f;  // a chain of additions each
        for (int i = threadIdx.x % WARP * PART; i < dim; i += WARP * PART) {
            float x[PART];
            load_floats(x, row + i);
#pragma unroll
            for (int j = 0; j < PART; j++) sums[j] = term(x[j], sums[j]);
        }
#pragma unroll
        for (int j = 0; j < PART; j++) sum += sums[j];
        return warp_reduce(sum, Sum());
    };
    mean = centred ? sum_of([](float x, float sum) { return sum + x; }) / dim : 0.0f;
    const float centre = mean;
    rstd = rsqrtf(sum_of([=](float x, float sum) { return fmaf(x - centre, x - centre, sum); }) / dim + eps);
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

// rows (ROWS, dim) = norm(what `load` gives of the stream, for which it waits); `raw` sees the rows before. store(row, i,
// value) is called with each result.
template <int SIZE, int ROWS, typename Load, typename Raw, typename Store>
void make_norm(float* rows, Block<ROWS>& block, const float* weight, const float* bias, int dim, float eps, Load load,
               Raw raw, Store store) {
    constexpr int PART = SIZE == 1 ? 1 : 4;
    const int begin = threadIdx.x * PART, step = blockDim.x * PART;
    NormPart<PART> first, part;
    first.load(weight, bias, begin, dim);  // on its way while the block waits
    for (int i = begin; i < dim; i += step)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float x[PART];
            load(x, r, i);
            store_shared(rows + r * dim + held_at<SIZE>(i, dim), x);
        }
    __syncthreads();  // the rows, written above, are read below by a warp each
    for (int r = threadIdx.x / WARP; r < ROWS; r += blockDim.x / WARP) {
        float mean, rstd;
        statistics<PART>(mean, rstd, rows + r * dim, dim, bias != nullptr, eps);
        block.mean[r] = mean, block.rstd[r] = rstd;  // all lanes the same
    }
    raw();
    __syncthreads();  // the statistics are there, and the rows as they were are read no more
    for (int i = begin; i < dim; i += step) {
        if (i == begin) part = first;
        else part.load(weight, bias, i, dim);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float x[PART];
            load_floats(x, rows + r * dim + held_at<SIZE>(i, dim));
#pragma unroll
            for (int j = 0; j < PART; j++) {
                x[j] = fmaf(__fmul_rn(x[j] - block.mean[r], block.rstd[r]), part.scale[j], part.shift[j]);
                store(r, i + j, x[j]);
            }
            store_shared(rows + r * dim + held_at<SIZE>(i, dim), x);
        }
    }
}
