// A linear layer for a few rows, as decoding has them: the weight's bytes are all that counts.
//
//     out[r, o] = sum over i of inp[r, i] * weight[o, i] (+ bias[o])
//
// Layout: inp (ROWS, inputs), weight (outputs, inputs), bias (outputs,) or null, out (ROWS, outputs), of T.
// Work: `blockDim.y` warps own two neighbouring outputs; then those of gridDim.x blocks further. Each of them sums over its share of the
//       inputs, the shares' vectors interleaved; a lane has PARTS vectors of either weight row under way.
// Overlap: the first weights, in practice all, are on their way before the kernel waits for the one that makes inp.
// Precision: fp32 arithmetic, one rounding to T. Determinism: every sum has a fixed order, which does not depend on ROWS; the fused
//            multiply-adds are written out, since the compiler would choose others for other ROWS.

#include "dependent_launch.cuh"
#include "vectors.cuh"

constexpr int WARPS = 4, PARTS = 4;

// Block (WARP, warps that share two outputs, pairs of outputs); pairs: all there are.
template <typename T, int SIZE, int ROWS>
__global__ void __launch_bounds__(WARPS * WARP, 2)
    linear_rows(T* out, const T* inp, const T* weight, const T* bias, int pairs, int outputs, int inputs) {
    __shared__ float warp_partials[WARPS][2][ROWS];
    const int lane = threadIdx.x, step = blockDim.y * WARP * SIZE, begin = (threadIdx.y * WARP + lane) * SIZE;
    int pair = blockIdx.x * blockDim.z + threadIdx.z;
    Packed<T, SIZE> w[2][PARTS];
    // Beyond the last output the last is summed up again, and not stored.
    const auto load = [&](int from) {
        const T* const rows[2] = {weight + (long long)min(2 * pair, outputs - 1) * inputs,
                                  weight + (long long)min(2 * pair + 1, outputs - 1) * inputs};
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int o = 0; o < 2; o++) {
                w[o][p].clear();
                if (from + p * step < inputs) w[o][p].load(rows[o] + from + p * step);
            }
    };

    launch_dependents();
    load(begin);
    if (bias && lane < 2) asm volatile("prefetch.global.L2 [%0];" ::"l"(bias + min(2 * pair + lane, outputs - 1)));
    grid_dependency_wait();
    // A block's warps go round equally often, for they meet at barriers.
    for (int block = blockIdx.x; block * blockDim.z < pairs; block += gridDim.x) {
        float sums[2][ROWS] = {};
        for (int base = 0; base < inputs; base += PARTS * step) {
            if (base > 0) load(base + begin);
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const int i = base + begin + p * step;
                if (i >= inputs) continue;
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    Packed<T, SIZE> x;
                    x.load(inp + r * inputs + i);
#pragma unroll
                    for (int j = 0; j < SIZE; j++)
#pragma unroll
                        for (int o = 0; o < 2; o++) sums[o][r] = fmaf(x(j), w[o][p](j), sums[o][r]);
                }
            }
        }
        const int done = 2 * pair;
        pair += gridDim.x * blockDim.z;
        if ((block + gridDim.x) * blockDim.z < pairs) load(begin);  // under way while the sums are put together
#pragma unroll
        for (int o = 0; o < 2; o++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float sum = warp_reduce(sums[o][r], Sum());
                if (lane == 0) warp_partials[threadIdx.z * blockDim.y + threadIdx.y][o][r] = sum;
            }
        __syncthreads();  // the warps' shares, written above, are added up below, a lane a row
        if (threadIdx.y == 0 && lane < ROWS) {
#pragma unroll
            for (int o = 0; o < 2; o++) {
                if (done + o >= outputs) continue;
                float sum = bias ? to_float(bias[done + o]) : 0.0f;
                for (int warp = 0; warp < blockDim.y; warp++) sum += warp_partials[threadIdx.z * blockDim.y + warp][o][lane];
                out[(long long)lane * outputs + done + o] = from_float<T>(sum);
            }
        }
        __syncthreads();  // separates these reads from the next round's writes
    }
}
