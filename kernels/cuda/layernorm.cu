// LayerNorm, alone and with the residual addition in front of it (one Euler step of the stream).
//
//     x = residual, the stream, or residual + branch, the stream from then on
//     mean = mean(x)                                    rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//     out  = (x - mean) * rstd * weight + bias
//
// With xhat = (x - mean) * rstd and g = dout * weight:
//
//     dinp     = rstd * (g - mean(g) - xhat * mean(g * xhat)) (+ dresidual, what arrives along the stream)
//     dweight += sum over rows of dout * xhat           dbias += sum over rows of dout
//
// Layout: out, branch and the gradients of activations (rows, dim) of T; the stream (rows, dim), weight, bias and their gradients
// (dim,), mean and rstd (rows,) fp32.
// Work: a warp, or for a long row a block, owns a row and holds it in registers (rows.cuh), so that it is read once. Backward, each
//       goes on to further rows, gridDim.x * blockDim.y away, and holds its shares of dweight and dbias in registers too; a block's
//       shares go to its rows of `partial_weight` and `partial_bias`, and columns.cu adds those rows up.
// Saved: mean and rstd, and the sum where there is one. Precision: fp32 arithmetic, the variance from the differences to the mean,
// one rounding to T at each store.
// Determinism: every sum has a fixed order; no atomics.
// Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equation 4.

#include "rows.cuh"

// branch and residual_out are null where there is no residual.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(512)
    layernorm_forward(float* residual_out, T* out, float* mean, float* rstd, const float* residual, const T* branch,
                      const float* weight, const float* bias, int rows, int dim, float eps) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long start = (long long)row * dim;
    Row<float, SIZE, VECTORS> x, w, b;
    x.load(residual + start, dim);
    if (branch) {
        Row<T, SIZE, VECTORS> step;
        step.load(branch + start, dim);
        x.set([&](int v, int j) { return x(v, j) + step(v, j); });
        x.store(residual_out + start, dim);
    }
    w.load(weight, dim);
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
        mean[row] = center;
        rstd[row] = scale;
    }
    Row<T, SIZE, VECTORS> y;
    y.set([&](int v, int j) { return (x(v, j) - center) * scale * w(v, j) + b(v, j); });
    y.store(out + start, dim);
}

// dresidual is null where nothing arrives along the stream; dinp may be dresidual or dout: a thread reads its elements of a row
// before it writes them. Beyond the row dout is zero, so that no sum needs a condition.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(512)
    layernorm_backward(T* dinp, float* partial_weight, float* partial_bias, const T* dresidual, const T* dout,
                       const float* inp, const float* weight, const float* mean, const float* rstd, int rows, int dim) {
    extern __shared__ float of_warp[];  // (blockDim.y, dim) where blockDim.y > 1
    float dweight[VECTORS][SIZE] = {}, dbias[VECTORS][SIZE] = {};
    for (int row = blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += gridDim.x * blockDim.y) {
        const long long start = (long long)row * dim;
        Row<float, SIZE, VECTORS> x, w;
        Row<T, SIZE, VECTORS> d, stream;
        x.load(inp + start, dim);
        d.load(dout + start, dim);
        if (dresidual) stream.load(dresidual + start, dim);
        const float center = mean[row], scale = rstd[row];
        w.load(weight, dim);  // from the first-level cache, here and below: there are no registers left to hold it
        float sum = 0.0f, dot = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                const float xhat = (x(v, j) - center) * scale, g = d(v, j) * w(v, j);
                dweight[v][j] += d(v, j) * xhat;
                dbias[v][j] += d(v, j);
                sum += g;
                dot += g * xhat;
            }
        const float g_mean = row_sum(sum) / dim, dot_mean = row_sum(dot) / dim;
        d.keep_packed();
        w.load_again(weight, dim);
        d.set([&](int v, int j) {
            const float xhat = (x(v, j) - center) * scale;
            const float dx = scale * (d(v, j) * w(v, j) - g_mean - xhat * dot_mean);
            return dresidual ? stream(v, j) + dx : dx;
        });
        d.store(dinp + start, dim);
    }
    store_column_sums<SIZE, VECTORS>(partial_weight, of_warp, dweight, dim);
    store_column_sums<SIZE, VECTORS>(partial_bias, of_warp, dbias, dim);
}
