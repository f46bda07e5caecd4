// The input rows of decode_step.cu's products in shared memory, rounded to bf16: the norms of the stream that make them.
#pragma once

#include "decode_model.cuh"

constexpr int PART = 4;  // elements of the stream that a thread has side by side

inline float sum_of(const float (&x)[PART]) { return (x[0] + x[1]) + (x[2] + x[3]); }

// Norms of rows of DIM elements, of which a thread has PASSES parts in registers, and warps 0 to USED - 1 have some.
template <typename M, int ROWS>
struct Norm {
    static constexpr int DIM = M::DIM, PASSES = parts(DIM, PART * THREADS), USED = smaller(WARPS, parts(DIM, PART * WARP));
    float2 warp_partials[ROWS][USED];  // each warp's mean, and the sum of squares about it

    // How many elements a warp has.
    static constexpr int count(int warp) {
        int elements = 0;
        for (int i = warp * WARP * PART; i < DIM; i += THREADS * PART) elements += smaller(WARP * PART, DIM - i);
        return elements;
    }
    // rows [ROWS][ROW_STRIDE] = norm(x), x given by load(x, row, i), which waits for it. store(row, i, x) sees each result. Each warp takes
    // a mean of its own, and each thread combines the warps' (Chan, Golub and LeVeque 1979). Means are 0 where the norm does not
    // centre, which is where it has no bias.
    template <typename Load, typename Store>
    void make(bf16* rows, const float* scale, const float* shift, float eps, Load load, Store store) {
        const int warp = threadIdx.x / WARP, begin = threadIdx.x * PART;
        float of_scale[PASSES][PART], of_shift[PASSES][PART], x[ROWS][PASSES][PART];
        if (warp < USED) {  // the whole warp
#pragma unroll
            for (int p = 0; p < PASSES; p++) {  // on their way while the block waits
                const int i = begin + p * THREADS * PART;
#pragma unroll
                for (int j = 0; j < PART; j++) of_scale[p][j] = of_shift[p][j] = 0.0f;
                if (i < DIM) load_floats(of_scale[p], scale + i);
                if (i < DIM && shift) load_floats(of_shift[p], shift + i);
            }
            const float elements = (float)(count(warp));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float sum = 0.0f, squares = 0.0f;
#pragma unroll
                for (int p = 0; p < PASSES; p++) {
                    const int i = begin + p * THREADS * PART;
#pragma unroll
                    for (int j = 0; j < PART; j++) x[r][p][j] = 0.0f;
                    if (i < DIM) load(x[r][p], r, i);
                    sum += sum_of(x[r][p]);
                }
                const float mean = shift ? __fdividef(warp_reduce(sum, Sum()), elements) : 0.0f;
#pragma unroll
                for (int p = 0; p < PASSES; p++) {
                    float apart[PART];
#pragma unroll
                    for (int j = 0; j < PART; j++) apart[j] = __fmul_rn(x[r][p][j] - mean, x[r][p][j] - mean);
                    if (begin + p * THREADS * PART < DIM) squares += sum_of(apart);
                }
                squares = warp_reduce(squares, Sum());
                if (threadIdx.x % WARP == 0) warp_partials[r][warp] = make_float2(mean, squares);
            }
        }
        __syncthreads();  // the warps' statistics, written above, are read by all; and the rows of the product before are read no more
        if (warp < USED) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float mean = 0.0f, squares = 0.0f;
#pragma unroll
                for (int w = 0; w < USED; w++) mean = fmaf(warp_partials[r][w].x, (float)count(w) / DIM, mean);
#pragma unroll
                for (int w = 0; w < USED; w++) {
                    const float apart = warp_partials[r][w].x - mean;
                    squares += fmaf(__fmul_rn(apart, apart), (float)count(w), warp_partials[r][w].y);
                }
                const float rstd = rsqrtf(fmaf(squares, 1.0f / DIM, eps));
#pragma unroll
                for (int p = 0; p < PASSES; p++) {
                    const int i = begin + p * THREADS * PART;
                    if (i >= DIM) continue;
#pragma unroll
                    for (int j = 0; j < PART; j++) {
                        x[r][p][j] = fmaf(__fmul_rn(x[r][p][j] - mean, rstd), of_scale[p][j], of_shift[p][j]);
                    }
                    const uint2 packed = make_uint2(pack(x[r][p][0], x[r][p][1]), pack(x[r][p][2], x[r][p][3]));
                    *reinterpret_cast<uint2*>(rows + r * ROW_STRIDE<DIM> + i) = packed;
                    store(r, i, packed);
                }
            }
        }
    }
};
