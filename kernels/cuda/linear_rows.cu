// A linear layer for a few rows, as decoding has them, with what comes before and after it: the weight's bytes are all that counts.
//
//     x = inp, or norm(stream)                              where there is a norm_weight: layernorm with a norm_bias, else rmsnorm
//     s[r, o] = sum over i of x[r, i] * weight[o, i] (+ bias[o])
//     out = s, gelu(s), silu(s[gate half]) * s[up half], or s turned by RoPE; or stream += s        as `then` says
//
// Layout: inp (ROWS, inputs), weight (outputs, inputs), bias (outputs,), out (ROWS, outputs), with SWIGLU (ROWS, outputs / 2), of T;
// stream (ROWS, inputs) where it is normalised and takes inp's place, (ROWS, outputs) where it is added to, norm_weight and norm_bias
// (inputs,), and as of rope.cu table (context, 2, distance), fp32; start (ROWS,) int.
// Work: `blockDim.y` warps own two outputs, `distance` apart: neighbours, or what SWIGLU and ROPE put together. Each of them sums
//       over its share of the inputs, the shares' vectors interleaved; a lane holds PARTS vectors of either weight row at a time.
//       The statistics of a row are small work, so each warp makes its own and none waits for another.
// Overlap: the first PARTS vectors, in practice all, are on their way before the kernel waits for the one that makes inp.
// Precision: fp32 arithmetic, one rounding to T. Determinism: every sum has a fixed order, which does not depend on ROWS; the fused
//            multiply-adds are written out, since the compiler would choose others for other ROWS.

#include "activation.cuh"
#include "overlap.cuh"
#include "vectors.cuh"

constexpr int WARPS = 4, PARTS = 4;
enum Then { STORE, GELU, ADD, SWIGLU, ROPE };

// mean is 0 where there is no norm_bias. All lanes of a warp.
template <int SIZE>
void statistics(float& mean, float& rstd, const float* row, int inputs, bool centred, float eps) {
    const auto over = [&](auto term) {
        float sum = 0.0f;
        for (int i = threadIdx.x * SIZE; i < inputs; i += WARP * SIZE) {
            float x[SIZE];
            load_floats(x, row + i);
#pragma unroll
            for (int j = 0; j < SIZE; j++) sum = term(x[j], sum);
        }
        return warp_reduce(sum, Sum()) / inputs;
    };
    if (centred) mean = over([](float x, float sum) { return sum + x; });
    rstd = rsqrtf(over([&](float x, float sum) { return fmaf(x - mean, x - mean, sum); }) + eps);
}

// Block (WARP, warps that share two outputs, pairs of outputs). rotated: heads of 2 * distance outputs that ROPE turns.
template <typename T, int SIZE, int ROWS>
__global__ void __launch_bounds__(WARPS * WARP)
    linear_rows(T* out, float* stream, const T* inp, const float* norm_weight, const float* norm_bias, const T* weight,
                const T* bias, const int* start, const float* table, int outputs, int inputs, int distance, int then, int length, int rotated, float eps) {
    __shared__ float of_warp[WARPS][2][ROWS];
    const int lane = threadIdx.x, pair = blockIdx.x * blockDim.z + threadIdx.z;
    const int first = pair / distance * 2 * distance + pair % distance, second = first + distance;
    // Beyond the last output the last is summed up again, and not stored.
    const T* const rows[2] = {weight + (long long)min(first, outputs - 1) * inputs,
                              weight + (long long)min(second, outputs - 1) * inputs};
    const int step = blockDim.y * WARP * SIZE;
    Packed<T, SIZE> w[2][PARTS];
    const auto load = [&](int from) {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int o = 0; o < 2; o++) {
                w[o][p].clear();
                if (from + p * step < inputs) w[o][p].load(rows[o] + from + p * step);
            }
    };

    let_next_start();
    int from = (threadIdx.y * WARP + lane) * SIZE;
    load(from);
    wait_for_previous();
    float mean[ROWS] = {}, rstd[ROWS], sums[2][ROWS] = {};
    if (norm_weight) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            statistics<SIZE>(mean[r], rstd[r], stream + r * inputs, inputs, norm_bias != nullptr, eps);
    }
    while (true) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int i = from + p * step;
            if (i >= inputs) break;
            float scale[SIZE], shift[SIZE] = {}, x[SIZE];
            if (norm_weight) load_floats(scale, norm_weight + i);
            if (norm_bias) load_floats(shift, norm_bias + i);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (norm_weight) {
                    load_floats(x, stream + r * inputs + i);
#pragma unroll
                    for (int j = 0; j < SIZE; j++) x[j] = fmaf((x[j] - mean[r]) * rstd[r], scale[j], shift[j]);
                } else {
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
        from += PARTS * step;
        if (from - lane * SIZE >= inputs) break;  // the same for all lanes
        load(from);
    }
#pragma unroll
    for (int o = 0; o < 2; o++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float sum = warp_reduce(sums[o][r], Sum());
            if (lane == 0) of_warp[threadIdx.z * blockDim.y + threadIdx.y][o][r] = sum;
        }
    __syncthreads();  // the warps' shares, written above, are added up below, a lane a row
    if (threadIdx.y > 0 || lane >= ROWS || first >= outputs) return;
    float a = bias ? to_float(bias[first]) : 0.0f, b = bias && second < outputs ? to_float(bias[second]) : 0.0f;
    for (int warp = 0; warp < blockDim.y; warp++) {
        a += of_warp[threadIdx.z * blockDim.y + warp][0][lane];
        b += of_warp[threadIdx.z * blockDim.y + warp][1][lane];
    }
    if (then == ADD) {
        float* const added = stream + (long long)lane * outputs;
        added[first] += a;
        if (second < outputs) added[second] += b;
        return;
    }
    T* const target = out + (long long)lane * (then == SWIGLU ? distance : outputs);
    if (then == SWIGLU) {
        target[first] = from_float<T>(a * sigmoid(a) * b);
        return;
    }
    if (then == ROPE && first < rotated * 2 * distance) {
        const float* const angle = table + (long long)(lane % length - start[lane]) * 2 * distance + first % distance;
        const float turned = fmaf(a, angle[0], -b * angle[distance]);
        b = fmaf(a, angle[distance], b * angle[0]);
        a = turned;
    }
    if (then == GELU) {
        a *= sigmoid_of_cubic(a);
        b *= sigmoid_of_cubic(b);
    }
    target[first] = from_float<T>(a);
    if (second < outputs) target[second] = from_float<T>(b);
}
