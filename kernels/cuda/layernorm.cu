// LayerNorm, alone or fused with the residual addition before it (one Euler step of the residual stream).
//
//     x    = residual, or residual + branch (+ branch_bias), stored as residual_out
//     mean = mean(x)                                    rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//     out  = (x - mean) * rstd * weight + bias
//
// Backward, with xhat = (x - mean) * rstd and g = dout * weight:
//
//     dinp     = rstd * (g - mean(g) - xhat * mean(g * xhat)) (+ dresidual, the stream's own gradient)
//     dweight += sum over rows of dout * xhat           dbias += sum over rows of dout
//     dbranch_bias += sum over rows of dinp, before dinp is rounded
//
// Layout: out, branch and the gradients of activations (rows, dim) of T. The residual stream (rows, dim),
//         mean and rstd (rows,), weight, bias, branch_bias and their gradients (dim,), all fp32.
// Work: a warp owns a row; a long row takes a whole block. Each strides over rows and prefetches its next row
//       to shared memory (RowQueue, rows.cuh), so it loads each row from global memory once.
//       Backward keeps sums for dweight, dbias and dbranch_bias in registers, and stores one row of each per
//       block to `partial`. sum_rows.cu then adds these rows to the gradients.
// Saved: mean and rstd, and residual_out if there is a residual.
// Precision: fp32 arithmetic, the variance from differences to the mean, one rounding to T at each store.
// Determinism: every sum has a fixed order; no atomics.
// Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equation 4.

#include "rows.cuh"

// branch and residual_out are null without a residual. branch_bias is null without a bias.
// stages: rows in the queue, 1 or 2.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(512)
    layernorm_forward(float* residual_out, T* out, float* mean, float* rstd, const float* residual,
                      const T* branch, const float* branch_bias, const float* weight, const float* bias,
                      int rows, int dim, int stages, float eps) {
    extern __shared__ float4 smem[];  // holds the queue
    RowQueue<T, SIZE, VECTORS, 1> queue(smem, residual, {branch}, rows, dim, stages);
    for (; queue.row < rows; queue.next()) {
        queue.wait();
        const Row<float, SIZE, VECTORS> x = add_branch(queue, residual_out, branch_bias);
        Row<float, SIZE, VECTORS> w, b;
        w.load(weight, dim);  // hits L1; keeping weight and bias across rows would need too many registers
        b.load(bias, dim);
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) sum += x(v, j);
        const float row_mean = row_sum(sum) / dim;
        float square_sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++)  // zeros beyond the row differ from the mean: skip them
                if (row_column<SIZE>(v) < dim) square_sum += (x(v, j) - row_mean) * (x(v, j) - row_mean);
        const float row_rstd = rsqrtf(row_sum(square_sum) / dim + eps);
        if (threadIdx.x == 0) {
            mean[queue.row] = row_mean;
            rstd[queue.row] = row_rstd;
        }
        Row<T, SIZE, VECTORS> y;
        y.set([&](int v, int j) { return (x(v, j) - row_mean) * row_rstd * w(v, j) + b(v, j); });
        y.store(out + (long long)queue.row * dim, dim);
    }
}

// dresidual is null if no gradient arrives along the stream. dinp may be dresidual or dout: shared memory
// holds the whole row before the kernel writes any of it. Beyond the row dout is zero, and the sums over the
// row need no condition. partial (2 or 3, gridDim.x, dim): the sums for dweight, dbias and, with BRANCH_BIAS,
// dbranch_bias.
template <typename T, int SIZE, int VECTORS, bool BRANCH_BIAS>
__global__ void __launch_bounds__(512)
    layernorm_backward(T* dinp, float* partial, const T* dresidual, const T* dout, const float* inp,
                       const float* weight, const float* mean, const float* rstd, int rows, int dim,
                       int stages) {
    // Holds the queue. After the loop it holds (blockDim.y, dim) floats if warps own rows; the queue is never
    // smaller.
    extern __shared__ float4 smem[];
    float dweight[VECTORS][SIZE] = {}, dbias[VECTORS][SIZE] = {}, dbranch_bias[VECTORS][SIZE] = {};
    RowQueue<T, SIZE, VECTORS, 2> queue(smem, inp, {dout, dresidual}, rows, dim, stages);
    float next_mean = 0.0f, next_rstd = 0.0f;
    if (queue.row < rows) next_mean = mean[queue.row], next_rstd = rstd[queue.row];
    for (; queue.row < rows; queue.next()) {
        const float row_mean = next_mean, row_rstd = next_rstd;
        const int next = queue.row + queue.step();
        if (next < rows) next_mean = mean[next], next_rstd = rstd[next];
        queue.wait();
        float sum = 0.0f, dot = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            separate_loads();
            const auto x = queue.stream(v), w = load_vector<SIZE>(weight, v, dim);  // weight hits L1
            const auto d = queue.get(0, v);
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                const float xhat = (x(j) - row_mean) * row_rstd, g = d(j) * w(j);
                dweight[v][j] += d(j) * xhat;
                dbias[v][j] += d(j);
                sum += g;
                dot += g * xhat;
            }
        }
        const float2 sums = row_sums(sum, dot);
        const float mean_term = row_rstd * (sums.x / dim);
        const float projection = row_rstd * row_rstd * (sums.y / dim);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            separate_loads<BRANCH_BIAS>();
            const auto x = queue.stream(v), w = load_vector<SIZE>(weight, v, dim);
            auto d = queue.get(0, v);
            const auto dstream = queue.get(1, v);  // dresidual, or zeros
            d.set([&](int j) {
                const float dx =
                    (dstream(j) - mean_term) - (x(j) - row_mean) * projection + d(j) * w(j) * row_rstd;
                if constexpr (BRANCH_BIAS) dbranch_bias[v][j] += dx;
                return dx;
            });
            const int column = row_column<SIZE>(v);
            if (column < dim) d.store(dinp + (long long)queue.row * dim + column);
        }
    }
    float* const warp_partials = reinterpret_cast<float*>(smem);
    store_column_sums<SIZE, VECTORS>(partial, 0, warp_partials, dweight, dim);
    store_column_sums<SIZE, VECTORS>(partial, 1, warp_partials, dbias, dim);
    if constexpr (BRANCH_BIAS) store_column_sums<SIZE, VECTORS>(partial, 2, warp_partials, dbranch_bias, dim);
}
