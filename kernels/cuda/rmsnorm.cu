// RMSNorm, alone and with the residual addition in front of it (one Euler step of the stream).
//
//     x = inp, or residual + inp                        (rounded to T, as it is kept)
//     rstd = 1 / sqrt(mean(x^2) + eps)                  out = x * rstd * weight
//
// With xhat = x * rstd and g = dout * weight:
//
//     dinp     = rstd * (g - xhat * mean(g * xhat)) (+ dresidual, what arrives along the stream)
//     dweight += sum over rows of dout * xhat
//
// Layout: activations and weight of T, (rows, dim) and (dim,); rstd (rows,) and dweight (dim,) fp32.
// Work: a warp, or for a long row a block, owns a row and holds it in registers, so that it is read once, and goes on to further
//       rows, gridDim.x * blockDim.y away, which are on their way meanwhile (rows.cuh). Backward, each holds its share of dweight
//       in registers too; a block's share goes to its row of `partial`, and columns.cu adds those rows up.
// Saved: rstd, and the sum where there is one. Precision: fp32 arithmetic, one rounding to T at each store.
// Determinism: every sum has a fixed order; no atomics.
// Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.

#include "rows.cuh"

// residual and residual_out are null where there is no residual.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(512) rmsnorm_forward(T* residual_out, T* out, float* rstd, const T* residual, const T* inp,
                                                       const T* weight, int rows, int dim, int stages, float eps) {
    extern __shared__ float4 shared[];  // the queue's
    for (RowQueue<T, SIZE, VECTORS, 2> queue(shared, {inp, residual}, rows, dim, stages); queue.row < rows; queue.next()) {
        const long long start = (long long)queue.row * dim;
        Row<T, SIZE, VECTORS> w;
        w.load(weight, dim);  // from the first-level cache; before the wait, as the first time it comes from memory
        queue.wait();
        Row<T, SIZE, VECTORS> x = queue.get(0);
        if (residual) {
            const auto stream = queue.get(1);
            x.set([&](int v, int j) { return x(v, j) + stream(v, j); });
            x.store(residual_out + start, dim);
        }
        float square_sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) square_sum += x(v, j) * x(v, j);
        const float scale = rsqrtf(row_sum(square_sum) / dim + eps);
        if (threadIdx.x == 0) rstd[queue.row] = scale;
        x.keep_packed();
        x.set([&](int v, int j) { return x(v, j) * scale * w(v, j); });
        x.store(out + start, dim);
    }
}

// dresidual is null where nothing arrives along the stream; dinp may be dresidual or dout: of a row, all is read before any is
// written.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(512)
    rmsnorm_backward(T* dinp, float* partial, const T* dresidual, const T* dout, const T* inp, const T* weight, const float* rstd,
                     int rows, int dim, int stages) {
    extern __shared__ float4 shared[];  // the queue's; where warps own rows, then (blockDim.y, dim) floats, which is less
    Row<T, SIZE, VECTORS> w;
    w.load(weight, dim);
    float dweight[VECTORS][SIZE] = {};
    RowQueue<T, SIZE, VECTORS, 3> queue(shared, {inp, dout, dresidual}, rows, dim, stages);
    float next_scale = queue.row < rows ? rstd[queue.row] : 0.0f;
    for (; queue.row < rows; queue.next()) {
        const float scale = next_scale;
        const int next = queue.row + queue.step();
        if (next < rows) next_scale = rstd[next];
        queue.wait();
        Row<T, SIZE, VECTORS> x = queue.get(0), d = queue.get(1);
        w.keep_packed();
        float dot = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                dweight[v][j] += d(v, j) * x(v, j) * scale;
                dot += d(v, j) * w(v, j) * x(v, j);
            }
        const float slope = row_sum(dot) * scale * scale * scale / dim;
        x.keep_packed();
        d.keep_packed();
        w.keep_packed();
        const auto stream = queue.get(2);
        x.set([&](int v, int j) { return stream(v, j) - x(v, j) * slope + d(v, j) * w(v, j) * scale; });
        x.store(dinp + (long long)queue.row * dim, dim);
    }
    store_column_sums<SIZE, VECTORS>(partial, reinterpret_cast<float*>(shared), dweight, dim);
}
