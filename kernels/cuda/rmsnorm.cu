// RMSNorm, alone and with the residual addition in front of it (one Euler step of the stream).
//
//     x = residual, the stream, or residual + branch (+ branch_bias), the stream from then on
//     rstd = 1 / sqrt(mean(x^2) + eps)                  out = x * rstd * weight
//
// With xhat = x * rstd and g = dout * weight:
//
//     dinp     = rstd * (g - xhat * mean(g * xhat)) (+ dresidual, what arrives along the stream)
//     dweight += sum over rows of dout * xhat           dbranch_bias += sum over rows of dinp, before it is rounded
//
// Layout: out, branch and the gradients of activations (rows, dim) of T; the stream (rows, dim), weight, branch_bias and their
// gradients (dim,), rstd (rows,) fp32.
// Work: a warp, or for a long row a block, owns a row, and goes on to further rows, gridDim.x * blockDim.y away, which are on their
//       way to shared memory meanwhile (rows.cuh), so that each is read from memory once. Backward, each holds its shares of
//       dweight and dbranch_bias in registers; a block's shares go to its rows of `partial`, and columns.cu adds those rows up.
// Saved: rstd, and the sum where there is one. Precision: fp32 arithmetic, one rounding to T at each store.
// Determinism: every sum has a fixed order; no atomics.
// Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.

#include "rows.cuh"

// branch and residual_out are null where there is no residual, branch_bias where it has none.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(512)
    rmsnorm_forward(float* residual_out, T* out, float* rstd, const float* residual, const T* branch,
                    const float* branch_bias, const float* weight, int rows, int dim, int stages, float eps) {
    extern __shared__ float4 shared[];  // the queue's
    for (RowQueue<T, SIZE, VECTORS, 1> queue(shared, residual, {branch}, rows, dim, stages); queue.row < rows; queue.next()) {
        queue.wait();
        const Row<float, SIZE, VECTORS> x = next_stream(queue, residual_out, branch_bias);
        Row<float, SIZE, VECTORS> w;
        w.load(weight, dim);  // from the first-level cache, for want of registers
        float square_sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) square_sum += x(v, j) * x(v, j);
        const float scale = rsqrtf(row_sum(square_sum) / dim + eps);
        if (threadIdx.x == 0) rstd[queue.row] = scale;
        Row<T, SIZE, VECTORS> y;
        y.set([&](int v, int j) { return x(v, j) * scale * w(v, j); });
        y.store(out + (long long)queue.row * dim, dim);
    }
}

// dresidual is null where nothing arrives along the stream; dinp may be dresidual or dout: of a row, all is in shared memory
// before any is written. partial (1, or with BRANCH_BIAS 2, gridDim.x, dim): of dweight and dbranch_bias.
template <typename T, int SIZE, int VECTORS, bool BRANCH_BIAS>
__global__ void __launch_bounds__(512)
    rmsnorm_backward(T* dinp, float* partial, const T* dresidual, const T* dout, const float* inp, const float* weight,
                     const float* rstd, int rows, int dim, int stages) {
    extern __shared__ float4 shared[];  // the queue's; where warps own rows, then (blockDim.y, dim) floats, which is less
    float dweight[VECTORS][SIZE] = {}, dbranch_bias[VECTORS][SIZE] = {};
    RowQueue<T, SIZE, VECTORS, 2> queue(shared, inp, {dout, dresidual}, rows, dim, stages);
    float next_scale = queue.row < rows ? rstd[queue.row] : 0.0f;
    for (; queue.row < rows; queue.next()) {
        const float scale = next_scale;
        const int next = queue.row + queue.step();
        if (next < rows) next_scale = rstd[next];
        queue.wait();
        float dot = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            separate_loads();
            const auto x = queue.stream(v), w = load_vector<SIZE>(weight, v, dim);  // w from the first-level cache
            const auto d = queue.get(0, v);
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                dweight[v][j] += d(j) * x(j) * scale;
                dot += d(j) * w(j) * x(j);
            }
        }
        const float slope = row_sum(dot) * scale * scale * scale / dim;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            separate_loads<BRANCH_BIAS>();
            const auto x = queue.stream(v), w = load_vector<SIZE>(weight, v, dim);
            auto d = queue.get(0, v);
            const auto dstream = queue.get(1, v);
            d.set([&](int j) {
                const float dx = dstream(j) - x(j) * slope + d(j) * w(j) * scale;
                if constexpr (BRANCH_BIAS) dbranch_bias[v][j] += dx;
                return dx;
            });
            const int column = row_column<SIZE>(v);
            if (column < dim) d.store(dinp + (long long)queue.row * dim + column);
        }
    }
    float* const warp_partials = reinterpret_cast<float*>(shared);
    store_column_sums<SIZE, VECTORS>(partial, 0, warp_partials, dweight, dim);
    if constexpr (BRANCH_BIAS) store_column_sums<SIZE, VECTORS>(partial, 1, warp_partials, dbranch_bias, dim);
}
