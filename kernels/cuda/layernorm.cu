// LayerNorm, alone and with the residual addition in front of it (one Euler step of the stream).
//
//     x = residual, the stream, or residual + branch (+ branch_bias), the stream from then on
//     mean = mean(x)                                    rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//     out  = (x - mean) * rstd * weight + bias
//
// With xhat = (x - mean) * rstd and g = dout * weight:
//
//     dinp     = rstd * (g - mean(g) - xhat * mean(g * xhat)) (+ dresidual, what arrives along the stream)
//     dweight += sum over rows of dout * xhat           dbias += sum over rows of dout
//     dbranch_bias += sum over rows of dinp, before it is rounded
//
// Layout: out, branch and the gradients of activations (rows, dim) of T; the stream (rows, dim), weight, bias, branch_bias and
// their gradients (dim,), mean and rstd (rows,) fp32.
// Work: a warp, or for a long row a block, owns a row, and goes on to further rows, gridDim.x * blockDim.y away, which are on their
//       way to shared memory meanwhile (rows.cuh), so that each is read from memory once. Backward, each holds its shares of
//       dweight, dbias and dbranch_bias in registers; a block's shares go to its rows of `partial`, and columns.cu adds those
//       rows up.
// Saved: mean and rstd, and the sum where there is one. Precision: fp32 arithmetic, the variance from the differences to the mean,
// one rounding to T at each store.
// Determinism: every sum has a fixed order; no atomics.
// Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equation 4.

#include "rows.cuh"

// branch and residual_out are null where there is no residual, branch_bias where it has none.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(512)
    layernorm_forward(float* residual_out, T* out, float* mean, float* rstd, const float* residual, const T* branch,
                      const float* branch_bias, const float* weight, const float* bias, int rows, int dim, int stages,
                      float eps) {
    extern __shared__ float4 shared[];  // the queue's
    for (RowQueue<T, SIZE, VECTORS, 1> queue(shared, residual, {branch}, rows, dim, stages); queue.row < rows; queue.next()) {
        queue.wait();
        const Row<float, SIZE, VECTORS> x = next_stream(queue, residual_out, branch_bias);
        Row<float, SIZE, VECTORS> w, b;
        w.load(weight, dim);  // from the first-level cache, for want of registers
        b.load(bias, dim);
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) sum += x(v, j);
        const float center = row_sum(sum) / dim;
        float square_sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++)  // the zeros beyond the row are no part of it
                if (row_column<SIZE>(v) < dim) square_sum += (x(v, j) - center) * (x(v, j) - center);
        const float scale = rsqrtf(row_sum(square_sum) / dim + eps);
        if (threadIdx.x == 0) {
            mean[queue.row] = center;
            rstd[queue.row] = scale;
        }
        Row<T, SIZE, VECTORS> y;
        y.set([&](int v, int j) { return (x(v, j) - center) * scale * w(v, j) + b(v, j); });
        y.store(out + (long long)queue.row * dim, dim);
    }
}

// dresidual is null where nothing arrives along the stream; dinp may be dresidual or dout: of a row, all is in shared memory
// before any is written. Beyond the row dout is zero, so that no sum over the row needs a condition. partial (2, or with
// BRANCH_BIAS 3, gridDim.x, dim): of dweight, dbias and dbranch_bias.
template <typename T, int SIZE, int VECTORS, bool BRANCH_BIAS>
__global__ void __launch_bounds__(512)
    layernorm_backward(T* dinp, float* partial, const T* dresidual, const T* dout, const float* inp, const float* weight,
                       const float* mean, const float* rstd, int rows, int dim, int stages) {
    extern __shared__ float4 shared[];  // the queue's; where warps own rows, then (blockDim.y, dim) floats, which is less
    float dweight[VECTORS][SIZE] = {}, dbias[VECTORS][SIZE] = {}, dbranch_bias[VECTORS][SIZE] = {};
    RowQueue<T, SIZE, VECTORS, 2> queue(shared, inp, {dout, dresidual}, rows, dim, stages);
    float next_center = 0.0f, next_scale = 0.0f;
    if (queue.row < rows) next_center = mean[queue.row], next_scale = rstd[queue.row];
    for (; queue.row < rows; queue.next()) {
        const float center = next_center, scale = next_scale;
        const int next = queue.row + queue.step();
        if (next < rows) next_center = mean[next], next_scale = rstd[next];
        queue.wait();
        float sum = 0.0f, dot = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            separate_loads();
            const auto x = queue.stream(v), w = load_vector<SIZE>(weight, v, dim);  // w from the first-level cache
            const auto d = queue.get(0, v);
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                const float xhat = (x(j) - center) * scale, g = d(j) * w(j);
                dweight[v][j] += d(j) * xhat;
                dbias[v][j] += d(j);
                sum += g;
                dot += g * xhat;
            }
        }
        const float2 sums = row_sums(sum, dot);
        const float shift = scale * (sums.x / dim), slope = scale * scale * (sums.y / dim);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            separate_loads<BRANCH_BIAS>();
            const auto x = queue.stream(v), w = load_vector<SIZE>(weight, v, dim);
            auto d = queue.get(0, v);
            const auto dstream = queue.get(1, v);
            d.set([&](int j) {
                const float dx = (dstream(j) - shift) - (x(j) - center) * slope + d(j) * w(j) * scale;
                if constexpr (BRANCH_BIAS) dbranch_bias[v][j] += dx;
                return dx;
            });
            const int column = row_column<SIZE>(v);
            if (column < dim) d.store(dinp + (long long)queue.row * dim + column);
        }
    }
    float* const warp_partials = reinterpret_cast<float*>(shared);
    store_column_sums<SIZE, VECTORS>(partial, 0, warp_partials, dweight, dim);
    store_column_sums<SIZE, VECTORS>(partial, 1, warp_partials, dbias, dim);
    if constexpr (BRANCH_BIAS) store_column_sums<SIZE, VECTORS>(partial, 2, warp_partials, dbranch_bias, dim);
}
