// A linear layer for a few rows, as decoding has them, with what comes before and after it: the weight's bytes are all that counts.
//
//     x = inp, or norm(stream)                              where there is a norm_weight: layernorm with a norm_bias, else rmsnorm
//     s[r, o] = sum over i of x[r, i] * weight[o, i] (+ bias[o])
//     out = s, gelu(s), silu(s[gate half]) * s[up half], or s turned by RoPE; or stream += s        as `then` says
//
// Layout: inp (ROWS, inputs), weight (outputs, inputs), bias (outputs,), out (ROWS, outputs), with SWIGLU (ROWS, outputs / 2), of T;
// stream (ROWS, inputs) where it is normalised and takes inp's place, (ROWS, outputs) where it is added to, norm_weight and norm_bias
// (inputs,), and as of rope.cu table (context, 2, distance), fp32; start (ROWS,) int.
// Work: `blockDim.y` warps own two outputs, `distance` apart: neighbours, or what SWIGLU and ROPE put together; then those of gridDim.x
//       blocks further. Each of them sums over its share of the inputs, the shares' vectors interleaved; a lane has PARTS vectors of
//       either weight row under way. The statistics of a row are small work, so each warp makes its own and none waits for another.
// Overlap: the first weights, in practice all, are on their way before the kernel waits for the one that makes inp, and the other
//       parameters on theirs to the second-level cache, out of which the weights of a token drive everything.
// Precision: fp32 arithmetic, one rounding to T. Determinism: every sum has a fixed order, which does not depend on ROWS; the fused
//            multiply-adds are written out, since the compiler would choose others for other ROWS.

#include "activation.cuh"
#include "overlap.cuh"
#include "vectors.cuh"

constexpr int WARPS = 4, PARTS = 4;
enum Then { STORE, GELU, ADD, SWIGLU, ROPE };

// visit(x) for a lane's share of a row, PARTS vectors of which are under way at a time.
template <int SIZE, typename Visit>
void over_row(const float* row, int inputs, Visit visit) {
    for (int first = threadIdx.x * SIZE; first < inputs; first += PARTS * WARP * SIZE) {
        float x[PARTS][SIZE];
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            if (first + p * WARP * SIZE < inputs) load_floats(x[p], row + first + p * WARP * SIZE);
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int j = 0; j < SIZE; j++)
                if (first + p * WARP * SIZE < inputs) visit(x[p][j]);
    }
}

// mean is 0 where there is no norm_bias. All lanes of a warp.
template <int SIZE>
void statistics(float& mean, float& rstd, const float* row, int inputs, bool centred, float eps) {
    float sum = 0.0f, square_sum = 0.0f;
    if (centred) {
        over_row<SIZE>(row, inputs, [&](float x) { sum += x; });
        mean = warp_reduce(sum, Sum()) / inputs;
    }
    over_row<SIZE>(row, inputs, [&](float x) { square_sum = fmaf(x - mean, x - mean, square_sum); });
    rstd = rsqrtf(warp_reduce(square_sum, Sum()) / inputs + eps);
}

// Towards the second-level cache, by the whole warp.
inline void prefetch(const void* from, int bytes) {
    constexpr int LINE = 128;
    if (from)
        for (int i = threadIdx.x * LINE; i < bytes; i += WARP * LINE)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(from) + i));
}

// Block (WARP, warps that share two outputs, pairs of outputs); pairs: all there are. rotated: heads of 2 * distance outputs that
// ROPE turns.
template <typename T, int SIZE, int ROWS>
__global__ void __launch_bounds__(WARPS * WARP, 2)
    linear_rows(T* out, float* stream, const T* inp, const float* norm_weight, const float* norm_bias, const T* weight,
                const T* bias, const int* start, const float* table, int pairs, int outputs, int inputs, int distance, int then,
                int length, int rotated, float eps) {
    __shared__ float of_warp[WARPS][2][ROWS];
    const int lane = threadIdx.x, step = blockDim.y * WARP * SIZE, begin = (threadIdx.y * WARP + lane) * SIZE;
    int pair = blockIdx.x * blockDim.z + threadIdx.z, first, second;
    Packed<T, SIZE> w[2][PARTS];
    // Beyond the last output the last is summed up again, and not stored.
    const auto load = [&](int from) {
        const T* const rows[2] = {weight + (long long)min(first, outputs - 1) * inputs,
                                  weight + (long long)min(second, outputs - 1) * inputs};
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int o = 0; o < 2; o++) {
                w[o][p].clear();
                if (from + p * step < inputs) w[o][p].load(rows[o] + from + p * step);
            }
    };
    const auto choose = [&] {
        first = pair / distance * 2 * distance + pair % distance;
        second = first + distance;
    };

    let_next_start();
    choose();
    load(begin);
    if (threadIdx.y == 0 && threadIdx.z == 0) {
        prefetch(norm_weight, inputs * sizeof(float));
        prefetch(norm_bias, inputs * sizeof(float));
    }
    if (bias && lane < 2) asm volatile("prefetch.global.L2 [%0];" ::"l"(bias + min(lane ? second : first, outputs - 1)));
    wait_for_previous();
    float mean[ROWS] = {}, rstd[ROWS];
    if (norm_weight) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            statistics<SIZE>(mean[r], rstd[r], stream + r * inputs, inputs, norm_bias != nullptr, eps);
    }
    // A block's warps go round equally often, for they meet at barriers.
    for (int block = blockIdx.x; block * blockDim.z < pairs; block += gridDim.x) {
        float sums[2][ROWS] = {};
        for (int base = 0; base < inputs; base += PARTS * step) {
            if (base > 0) load(base + begin);
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const int i = base + begin + p * step;
                const bool inside = i < inputs;
                float scale[SIZE] = {}, shift[SIZE] = {}, x[SIZE] = {};
                if (norm_weight && inside) load_floats(scale, norm_weight + i);
                if (norm_bias && inside) load_floats(shift, norm_bias + i);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    if (norm_weight) {
                        if (inside) load_floats(x, stream + r * inputs + i);
#pragma unroll
                        for (int j = 0; j < SIZE; j++) x[j] = fmaf((x[j] - mean[r]) * rstd[r], scale[j], shift[j]);
                    } else if (inside) {
                        Packed<T, SIZE> loaded;
                        loaded.load(inp + r * inputs + i);
#pragma unroll
                        for (int j = 0; j < SIZE; j++) x[j] = loaded(j);
                    }
#pragma unroll
                    for (int j = 0; j < SIZE; j++)
#pragma unroll
                        for (int o = 0; o < 2; o++) sums[o][r] = fmaf(x[j], w[o][p](j), sums[o][r]);
                }
            }
        }
        const int done_first = first, done_second = second;
        pair += gridDim.x * blockDim.z;
        choose();
        if ((block + gridDim.x) * blockDim.z < pairs) load(begin);  // under way while the sums are put together
#pragma unroll
        for (int o = 0; o < 2; o++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float sum = warp_reduce(sums[o][r], Sum());
                if (lane == 0) of_warp[threadIdx.z * blockDim.y + threadIdx.y][o][r] = sum;
            }
        __syncthreads();  // the warps' shares, written above, are added up below, a lane a row
        if (threadIdx.y == 0 && lane < ROWS && done_first < outputs) {
            float a = bias ? to_float(bias[done_first]) : 0.0f;
            float b = bias && done_second < outputs ? to_float(bias[done_second]) : 0.0f;
            for (int warp = 0; warp < blockDim.y; warp++) {
                a += of_warp[threadIdx.z * blockDim.y + warp][0][lane];
                b += of_warp[threadIdx.z * blockDim.y + warp][1][lane];
            }
            if (then == ADD) {
                float* const added = stream + (long long)lane * outputs;
                added[done_first] += a;
                if (done_second < outputs) added[done_second] += b;
            } else if (then == SWIGLU) {
                out[(long long)lane * distance + done_first] = from_float<T>(a * sigmoid(a) * b);
            } else {
                if (then == ROPE && done_first < rotated * 2 * distance) {
                    const float* const angle =
                        table + (long long)(lane % length - start[lane]) * 2 * distance + done_first % distance;
                    const float turned = fmaf(a, angle[0], -b * angle[distance]);
                    b = fmaf(a, angle[distance], b * angle[0]);
                    a = turned;
                }
                if (then == GELU) {
                    a *= sigmoid_of_cubic(a);
                    b *= sigmoid_of_cubic(b);
                }
                out[(long long)lane * outputs + done_first] = from_float<T>(a);
                if (done_second < outputs) out[(long long)lane * outputs + done_second] = from_float<T>(b);
            }
        }
        __syncthreads();  // separates these reads from the next round's writes
    }
}
