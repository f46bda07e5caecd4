// The input rows of decode_step.cu's products in shared memory, and the norms that make them.
#pragma once

#include "decode_model.cuh"

// Of a block. Single elements take more registers, and are no case to be fast in.
template <int SIZE>
constexpr int MOST_THREADS = SIZE == 1 ? 256 : 512;
constexpr int MOST_WARPS = MOST_THREADS<0> / WARP;

// What a block works on beside the stream of weights.
template <typename T, int ROWS>
struct Block {
    Shape shape[PRODUCTS];
    Begin<T> begin[MOST_WARPS * PRODUCTS];
    float of_warp[MOST_WARPS][2][ROWS];
    int given[1 + 2 * ROWS];  // what the cache holds; of each row where it begins; its token
    alignas(16) float norm_sum[2][ROWS][MOST_WARPS];  // of the elements, and of the squares; 0 where a warp has none
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

// The warps' sums added up, in the same order in every thread.
inline float sum_of_warps(const float (&of_warp)[MOST_WARPS]) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < MOST_WARPS; i += 4) {
        float x[4];
        load_floats(x, of_warp + i);
#pragma unroll
        for (int j = 0; j < 4; j++) sums[j] += x[j];
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
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
// warp sums its own, and each thread adds up the warps' sums. The mean is 0 where the norm does not centre.
template <int SIZE, typename T, int ROWS, typename Load, typename Raw, typename Store>
void make_norm(float* rows, Block<T, ROWS>& block, const float* weight, const float* bias, int dim, float eps, Load load,
               bool has_raw, Raw raw, Store store) {
    constexpr int PART = SIZE == 1 ? 1 : 4;
    const int begin = threadIdx.x * PART, step = blockDim.x * PART, warp = threadIdx.x / WARP;
    const bool works = warp * WARP * PART < dim;  // the whole warp or none of it
    NormPart<PART> first, part;
    first.load(weight, bias, begin, dim);  // on its way while the block waits
    const auto mean = [&](int r) { return bias ? sum_of_warps(block.norm_sum[0][r]) / dim : 0.0f; };
    const auto sum = [&](int which, auto of) {  // of the thread's vectors, of(row, i) each
        if (!works) return;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float all = 0.0f;
            for (int i = begin; i < dim; i += step) all += of(r, i);
            all = warp_reduce(all, Sum());
            if (threadIdx.x % WARP == 0) block.norm_sum[which][r][warp] = all;
        }
    };
    const auto held = [&](float (&x)[PART], int r, int i) { load_floats(x, rows + r * dim + held_at<SIZE>(i, dim)); };
    const auto read = [&](float (&x)[PART], int r, int i) {
        load(x, r, i);
        store_shared(rows + r * dim + held_at<SIZE>(i, dim), x);
    };
    const auto squares = [&](const float (&x)[PART], float centre) {
        float of[PART];
#pragma unroll
        for (int j = 0; j < PART; j++) of[j] = __fmul_rn(x[j] - centre, x[j] - centre);
        if constexpr (PART == 1) return of[0];
        else return (of[0] + of[1]) + (of[2] + of[3]);
    };
    if (bias) {
        sum(0, [&](int r, int i) {
            float x[PART];
            read(x, r, i);
            if constexpr (PART == 1) return x[0];
            else return (x[0] + x[1]) + (x[2] + x[3]);
        });
        __syncthreads();  // the sums, written above, are read by all
    }
    sum(1, [&](int r, int i) {
        float x[PART];
        if (bias) held(x, r, i);
        else read(x, r, i);
        return squares(x, mean(r));
    });
    __syncthreads();  // the sums, written above, are read by all, and maybe the rows
    if (has_raw) {
        raw();
        __syncthreads();  // the rows as they were are read no more
    }
    for (int i = begin; i < dim; i += step) {
        if (i == begin) part = first;
        else part.load(weight, bias, i, dim);
#pragma unroll 1  // rows side by side would take too many registers
        for (int r = 0; r < ROWS; r++) {
            float x[PART];
            held(x, r, i);
            const float centre = mean(r), rstd = rsqrtf(sum_of_warps(block.norm_sum[1][r]) / dim + eps);
#pragma unroll
            for (int j = 0; j < PART; j++) {
                x[j] = fmaf(__fmul_rn(x[j] - centre, rstd), part.scale[j], part.shift[j]);
                store(r, i + j, x[j]);
            }
            store_shared(rows + r * dim + held_at<SIZE>(i, dim), x);
        }
    }
}
