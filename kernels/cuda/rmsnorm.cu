// RMSNorm, alone or fused with the residual addition before it (one Euler step of the residual stream).
//
//     x    = residual, or residual + branch (+ branch_bias), stored as residual_out
//     rstd = 1 / sqrt(mean(x^2) + eps)                  out = x * rstd * weight
//
// Backward, with xhat = x * rstd and g = dout * weight:
//
//     dinp     = rstd * (g - xhat * mean(g * xhat)) (+ dresidual, the stream's own gradient)
//     dweight += sum over rows of dout * xhat
//     dbranch_bias += sum over rows of dinp, before dinp is rounded
//
// Layout: out, branch and the gradients of activations (rows, dim) of T. The residual stream (rows, dim),
//         rstd (rows,), weight, branch_bias and their gradients (dim,), all fp32.
// Work: a warp owns a row; a long row takes a whole block. Each strides over rows and prefetches its next row
//       to shared memory (RowQueue, rows.cuh), so it loads each row from global memory once.
//       Backward keeps sums for dweight and dbranch_bias in registers, and stores one row of each per block
//       to `partial`. sum_rows.cu then adds these rows to the gradients.
// Saved: rstd, and residual_out if there is a residual.
// Precision: fp32 arithmetic, one rounding to T at each store.
// Determinism: every sum has a fixed order; no atomics.
// Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.

#include "rows.cuh"

// branch and residual_out are null without a residual. branch_bias is null without a bias.
// stages: rows in the queue, 1 or 2.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(512)
    rmsnorm_forward(float* residual_out, T* out, float* rstd, const float* residual, const T* branch,
                    const float* branch_bias, const float* weight, int rows, int dim, int stages, float eps) {
    extern __shared__ float4 smem[];  // holds the queue
    RowQueue<T, SIZE, VECTORS, 1> queue(smem, residual, {branch}, rows, dim, stages);
    for (; queue.row < rows; queue.next()) {
        queue.wait();
        const Row<float, SIZE, VECTORS> x = add_branch(queue, residual_out, branch_bias);
        Row<float, SIZE, VECTORS> w;
        w.load(weight, dim);  // hits L1; keeping it across rows would need too many registers
        float square_sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) square_sum += x(v, j) * x(v, j);
        const float row_rstd = rsqrtf(row_sum(square_sum) / dim + eps);
        if (threadIdx.x == 0) rstd[queue.row] = row_rstd;
        Row<T, SIZE, VECTORS> y;
        y.set([&](int v, int j) { return x(v, j) * row_rstd * w(v, j); });
        y.store(out + (long long)queue.row * dim, dim);
    }
}

// dresidual is null if no gradient arrives along the stream. dinp may be dresidual or dout: shared memory
// holds the whole row before the kernel writes any of it. Beyond the row dout is zero, and the sum over the
// row needs no condition. partial (1 or 2, gridDim.x, dim): the sums for dweight and, with BRANCH_BIAS,
// dbranch_bias.
template <typename T, int SIZE, int VECTORS, bool BRANCH_BIAS>
__global__ void __launch_bounds__(512)
    rmsnorm_backward(T* dinp, float* partial, const T* dresidual, const T* dout, const float* inp,
                     const float* weight, const float* rstd, int rows, int dim, int stages) {
    // Holds the queue. After the loop it holds (blockDim.y, dim) floats if warps own rows; the queue is never
    // smaller.
    extern __shared__ float4 smem[];
    float dweight[VECTORS][SIZE] = {}, dbranch_bias[VECTORS][SIZE] = {};
    RowQueue<T, SIZE, VECTORS, 2> queue(smem, inp, {dout, dresidual}, rows, dim, stages);
    float next_rstd = queue.row < rows ? rstd[queue.row] : 0.0f;
    for (; queue.row < rows; queue.next()) {
        const float row_rstd = next_rstd;
        const int next = queue.row + queue.step();
        if (next < rows) next_rstd = rstd[next];
        queue.wait();
        float dot = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            separate_loads();
            const auto x = queue.stream(v), w = load_vector<SIZE>(weight, v, dim);  // weight hits L1
            const auto d = queue.get(0, v);
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                dweight[v][j] += d(j) * x(j) * row_rstd;
                dot += d(j) * w(j) * x(j);
            }
        }
        const float projection = row_sum(dot) * row_rstd * row_rstd * row_rstd / dim;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            separate_loads<BRANCH_BIAS>();
            const auto x = queue.stream(v), w = load_vector<SIZE>(weight, v, dim);
            auto d = queue.get(0, v);
            const auto dstream = queue.get(1, v);  // dresidual, or zeros
            d.set([&](int j) {
                const float dx = dstream(j) - x(j) * projection + d(j) * w(j) * row_rstd;
                if constexpr (BRANCH_BIAS) dbranch_bias[v][j] += dx;
                return dx;
            });
            const int column = row_column<SIZE>(v);
            if (column < dim) d.store(dinp + (long long)queue.row * dim + column);
        }
    }
    float* const warp_partials = reinterpret_cast<float*>(smem);
    store_column_sums<SIZE, VECTORS>(partial, 0, warp_partials, dweight, dim);
    if constexpr (BRANCH_BIAS) store_column_sums<SIZE, VECTORS>(partial, 1, warp_partials, dbranch_bias, dim);
}
