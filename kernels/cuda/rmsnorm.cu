// RMSNorm, alone and with the residual addition in front of it (one Euler step of the stream).
//
//     x = residual, the stream, or residual + branch, the stream from then on
//     rstd = 1 / sqrt(mean(x^2) + eps)                  out = x * rstd * weight
//
// With xhat = x * rstd and g = dout * weight:
//
//     dinp     = rstd * (g - xhat * mean(g * xhat)) (+ dresidual, what arrives along the stream)
//     dweight += sum over rows of dout * xhat
//
// Layout: out, branch and the gradients of activations (rows, dim) of T; the stream (rows, dim), weight and dweight (dim,), rstd
// (rows,) fp32.
// Work: a warp, or for a long row a block, owns a row and holds it in registers (rows.cuh), so that it is read once. Backward, each
//       goes on to further rows, gridDim.x * blockDim.y away, and holds its share of dweight in registers too; a block's share
//       goes to its row of `partial`, and columns.cu adds those rows up.
// Saved: rstd, and the sum where there is one. Precision: fp32 arithmetic, one rounding to T at each store.
// Determinism: every sum has a fixed order; no atomics.
// Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.

#include "rows.cuh"

// branch and residual_out are null where there is no residual.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(512) rmsnorm_forward(float* residual_out, T* out, float* rstd, const float* residual,
                                                       const T* branch, const float* weight, int rows, int dim, float eps) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long start = (long long)row * dim;
    Row<float, SIZE, VECTORS> x, w;
    x.load(residual + start, dim);
    if (branch) {
        Row<T, SIZE, VECTORS> step;
        step.load(branch + start, dim);
        x.set([&](int v, int j) { return x(v, j) + step(v, j); });
        x.store(residual_out + start, dim);
    }
    w.load(weight, dim);
    float square_sum = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int j = 0; j < SIZE; j++) square_sum += x(v, j) * x(v, j);
    const float scale = rsqrtf(row_sum(square_sum) / dim + eps);
    if (threadIdx.x == 0) rstd[row] = scale;
    Row<T, SIZE, VECTORS> y;
    y.set([&](int v, int j) { return x(v, j) * scale * w(v, j); });
    y.store(out + start, dim);
}

// dresidual is null where nothing arrives along the stream; dinp may be dresidual or dout: a thread reads its elements of a row
// before it writes them.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(512)
    rmsnorm_backward(T* dinp, float* partial, const T* dresidual, const T* dout, const float* inp, const float* weight,
                     const float* rstd, int rows, int dim) {
    extern __shared__ float of_warp[];  // (blockDim.y, dim) where blockDim.y > 1
    float dweight[VECTORS][SIZE] = {};
    for (int row = blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += gridDim.x * blockDim.y) {
        const long long start = (long long)row * dim;
        Row<float, SIZE, VECTORS> x, w;
        Row<T, SIZE, VECTORS> d, stream;
        x.load(inp + start, dim);
        d.load(dout + start, dim);
        if (dresidual) stream.load(dresidual + start, dim);
        const float scale = rstd[row];
        w.load(weight, dim);  // from the first-level cache, here and below: there are no registers left to hold it
        float dot = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                dweight[v][j] += d(v, j) * x(v, j) * scale;
                dot += d(v, j) * w(v, j) * x(v, j);
            }
        const float shift = row_sum(dot) * scale * scale * scale / dim;
        d.keep_packed();
        w.load_again(weight, dim);
        d.set([&](int v, int j) {
            const float dx = d(v, j) * w(v, j) * scale - x(v, j) * shift;
            return dresidual ? stream(v, j) + dx : dx;
        });
        d.store(dinp + start, dim);
    }
    store_column_sums<SIZE, VECTORS>(partial, of_warp, dweight, dim);
}
