// The norms of decode_step.cu: normalised rows of the residual stream, written to shared memory as bf16.
#pragma once

#include "decode_model.cuh"
#include "vectors.cuh"

constexpr int FP32_VEC = 4;  // consecutive elements of the stream in one thread: 16 bytes of norm weights

inline float sum_of(const float (&x)[FP32_VEC]) { return (x[0] + x[1]) + (x[2] + x[3]); }

// LayerNorm or RMSNorm of ROWS rows of DIM elements. Thread t holds vectors t, t + THREADS, ... of FP32_VEC
// elements, at most VECS_PER_THREAD of each row. Only warps 0 .. ACTIVE_WARPS - 1 hold elements.
template <typename M, int ROWS>
struct RowNorm {
    static constexpr int DIM = M::DIM, VECS_PER_THREAD = ceil_div(DIM, FP32_VEC * THREADS);
    static constexpr int ACTIVE_WARPS = const_min(WARPS, ceil_div(DIM, FP32_VEC * WARP));
    float2 warp_partials[ROWS][ACTIVE_WARPS];  // each warp's mean, and its sum of squared deviations from it

    // Elements of one row that a warp holds.
    static constexpr int elements_of(int warp) {
        int elements = 0;
        for (int i = warp * WARP * FP32_VEC; i < DIM; i += THREADS * FP32_VEC)
            elements += const_min(WARP * FP32_VEC, DIM - i);
        return elements;
    }
    // smem_x [ROWS][ROW_STRIDE] = norm(x). load(x, row, i) polls until elements i .. of x have arrived.
    // store(row, i, y) is called with each result. A null bias means RMSNorm, where all means are 0. Each
    // warp computes its own mean and squared deviations. Every thread then combines those of all warps (Chan,
    // Golub and LeVeque 1979).
    template <typename Load, typename Store>
    void normalize(bf16* smem_x, const float* weight, const float* bias, float eps, Load load, Store store) {
        const int warp = threadIdx.x / WARP, begin = threadIdx.x * FP32_VEC;
        float w[VECS_PER_THREAD][FP32_VEC], b[VECS_PER_THREAD][FP32_VEC], x[ROWS][VECS_PER_THREAD][FP32_VEC];
        if (warp < ACTIVE_WARPS) {  // warp-uniform, as warp_reduce needs
#pragma unroll
            for (int v = 0; v < VECS_PER_THREAD; v++) {  // in flight while the block polls for x
                const int i = begin + v * THREADS * FP32_VEC;
#pragma unroll
                for (int j = 0; j < FP32_VEC; j++) w[v][j] = b[v][j] = 0.0f;
                if (i < DIM) load_floats(w[v], weight + i);
                if (i < DIM && bias) load_floats(b[v], bias + i);
            }
            const float elements = (float)(elements_of(warp));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float sum = 0.0f, squares = 0.0f;
#pragma unroll
                for (int v = 0; v < VECS_PER_THREAD; v++) {
                    const int i = begin + v * THREADS * FP32_VEC;
#pragma unroll
                    for (int j = 0; j < FP32_VEC; j++) x[r][v][j] = 0.0f;
                    if (i < DIM) load(x[r][v], r, i);
                    sum += sum_of(x[r][v]);
                }
                const float mean = bias ? __fdividef(warp_reduce(sum, Sum()), elements) : 0.0f;
#pragma unroll
                for (int v = 0; v < VECS_PER_THREAD; v++) {
                    float squared[FP32_VEC];
#pragma unroll
                    for (int j = 0; j < FP32_VEC; j++)
                        squared[j] = __fmul_rn(x[r][v][j] - mean, x[r][v][j] - mean);
                    if (begin + v * THREADS * FP32_VEC < DIM) squares += sum_of(squared);
                }
                squares = warp_reduce(squares, Sum());
                if (threadIdx.x % WARP == 0) warp_partials[r][warp] = make_float2(mean, squares);
            }
        }
        // Separates the writes of warp_partials from the reads below. The matmul's barriers separate these
        // reads from the next call's writes.
        __syncthreads();
        if (warp < ACTIVE_WARPS) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float mean = 0.0f, squares = 0.0f;
#pragma unroll
                for (int i = 0; i < ACTIVE_WARPS; i++)
                    mean = fmaf(warp_partials[r][i].x, (float)elements_of(i) / DIM, mean);
#pragma unroll
                for (int i = 0; i < ACTIVE_WARPS; i++) {
                    const float deviation = warp_partials[r][i].x - mean;
                    const float between = __fmul_rn(deviation, deviation);
                    squares += fmaf(between, (float)elements_of(i), warp_partials[r][i].y);
                }
                const float rstd = rsqrtf(fmaf(squares, 1.0f / DIM, eps));
#pragma unroll
                for (int v = 0; v < VECS_PER_THREAD; v++) {
                    const int i = begin + v * THREADS * FP32_VEC;
                    if (i >= DIM) continue;
#pragma unroll
                    for (int j = 0; j < FP32_VEC; j++)
                        x[r][v][j] = fmaf(__fmul_rn(x[r][v][j] - mean, rstd), w[v][j], b[v][j]);
                    const uint2 y = make_uint2(pack(x[r][v][0], x[r][v][1]), pack(x[r][v][2], x[r][v][3]));
                    *reinterpret_cast<uint2*>(smem_x + r * ROW_STRIDE<DIM> + i) = y;
                    store(r, i, y);
                }
            }
        }
    }
};
