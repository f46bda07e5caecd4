// A linear layer for a few rows, as in decode. It is bound by the bytes of the weight.
//
//     out[r, o] = sum over i of inp[r, i] * weight[o, i] (+ bias[o])
//
// Layout: of T: inp (ROWS, inputs), weight (outputs, inputs), bias (outputs,) or null, out (ROWS, outputs).
// Block: (WARP, blockDim.y, blockDim.z). blockDim.y warps compute a pair of neighbouring outputs by split-K;
//        their vectors of the inputs are interleaved. The block strides over pairs by gridDim.x * blockDim.z.
// Lane: VECS vectors of each of the two weight rows are in flight.
// Overlap: the first weights, in practice all, are loaded before the kernel waits for the one that writes
//          inp.
// Precision: fp32 arithmetic, one rounding to T.
// Determinism: every sum has a fixed order, which does not depend on ROWS. Multiply-adds are written out: the
//              compiler would contract them differently for other ROWS.

#include "dependent_launch.cuh"
#include "vectors.cuh"

constexpr int WARPS = 4, VECS = 4;  // not tuned

// pairs: of outputs, in total.
template <typename T, int SIZE, int ROWS>
__global__ void __launch_bounds__(WARPS * WARP, 2)
    linear_rows(T* out, const T* inp, const T* weight, const T* bias, int pairs, int outputs, int inputs) {
    __shared__ float warp_partials[WARPS][2][ROWS];
    const int lane = threadIdx.x;
    const int stride = blockDim.y * WARP * SIZE, begin = (threadIdx.y * WARP + lane) * SIZE;
    int pair = blockIdx.x * blockDim.z + threadIdx.z;
    Packed<T, SIZE> w[2][VECS];
    // Beyond the last output, its row is loaded again; the sums are not stored.
    const auto load_weights = [&](int first) {
        const T* const rows[2] = {weight + (long long)min(2 * pair, outputs - 1) * inputs,
                                  weight + (long long)min(2 * pair + 1, outputs - 1) * inputs};
#pragma unroll
        for (int v = 0; v < VECS; v++)
#pragma unroll
            for (int o = 0; o < 2; o++) {
                w[o][v].clear();
                if (first + v * stride < inputs) w[o][v].load(rows[o] + first + v * stride);
            }
    };

    launch_dependents();
    load_weights(begin);
    if (bias && lane < 2)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(bias + min(2 * pair + lane, outputs - 1)));
    grid_dependency_wait();
    // All warps of a block make the same number of passes, because they meet at barriers.
    for (int block = blockIdx.x; block * blockDim.z < pairs; block += gridDim.x) {
        float sums[2][ROWS] = {};
        for (int base = 0; base < inputs; base += VECS * stride) {
            if (base > 0) load_weights(base + begin);
#pragma unroll
            for (int v = 0; v < VECS; v++) {
                const int i = base + begin + v * stride;
                if (i >= inputs) continue;
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    Packed<T, SIZE> x;
                    x.load(inp + r * inputs + i);
#pragma unroll
                    for (int j = 0; j < SIZE; j++)
#pragma unroll
                        for (int o = 0; o < 2; o++) sums[o][r] = fmaf(x(j), w[o][v](j), sums[o][r]);
                }
            }
        }
        const int first_output = 2 * pair;
        pair += gridDim.x * blockDim.z;
        // The next pair's weights are in flight while the sums are reduced.
        if ((block + gridDim.x) * blockDim.z < pairs) load_weights(begin);
#pragma unroll
        for (int o = 0; o < 2; o++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float sum = warp_reduce(sums[o][r], Sum());
                if (lane == 0) warp_partials[threadIdx.z * blockDim.y + threadIdx.y][o][r] = sum;
            }
        __syncthreads();  // separates the writes of warp_partials from the reads below
        if (threadIdx.y == 0 && lane < ROWS) {  // one lane a row
#pragma unroll
            for (int o = 0; o < 2; o++) {
                if (first_output + o >= outputs) continue;
                float sum = bias ? to_float(bias[first_output + o]) : 0.0f;
                for (int warp = 0; warp < blockDim.y; warp++)
                    sum += warp_partials[threadIdx.z * blockDim.y + warp][o][lane];
                out[(long long)lane * outputs + first_output + o] = from_float<T>(sum);
            }
        }
        __syncthreads();  // separates these reads from the next pass's writes
    }
}
