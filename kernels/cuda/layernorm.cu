// LayerNorm, alone and with the residual addition in front of it (one Euler step of the stream).
//
//     x = inp, or residual + inp                        (rounded to T, as it is kept)
//     mean = mean(x)                                    rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//     out  = (x - mean) * rstd * weight + bias
//
// With xhat = (x - mean) * rstd and g = dout * weight:
//
//     dinp     = rstd * (g - mean(g) - xhat * mean(g * xhat)) (+ dresidual, what arrives along the stream)
//     dweight += sum over rows of dout * xhat           dbias += sum over rows of dout
//
// Layout: activations, weight and bias of T, (rows, dim) and (dim,); mean and rstd (rows,), dweight and dbias (dim,) fp32.
// Work: a warp, or for a long row a block, owns a row and holds it in registers, so that it is read once, and goes on to further
//       rows, gridDim.x * blockDim.y away, which are on their way meanwhile (rows.cuh). Backward, each holds its shares of dweight
//       and dbias in registers too; a block's shares go to its rows of `partial_weight` and `partial_bias`, and columns.cu adds
//       those rows up.
// Saved: mean and rstd, and the sum where there is one. Precision: fp32 arithmetic, the variance from the differences to the mean,
// one rounding to T at each store.
// Determinism: every sum has a fixed order; no atomics.
// Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equation 4.

#include "rows.cuh"

// residual and residual_out are null where there is no residual.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(512)
    layernorm_forward(T* residual_out, T* out, float* mean, float* rstd, const T* residual, const T* inp, const T* weight,
                      const T* bias, int rows, int dim, int stages, float eps) {
    extern __shared__ float4 shared[];  // the queue's
    for (RowQueue<T, SIZE, VECTORS, 2> queue(shared, {inp, residual}, rows, dim, stages); queue.row < rows; queue.next()) {
        const long long start = (long long)queue.row * dim;
        Row<T, SIZE, VECTORS> w, b;
        w.load(weight, dim);  // from the first-level cache; before the wait, as the first time they come from memory
        b.load(bias, dim);
        queue.wait();
        Row<T, SIZE, VECTORS> x = queue.get(0);
        if (residual) {
            const auto stream = queue.get(1);
            x.set([&](int v, int j) { return x(v, j) + stream(v, j); });
            x.store(residual_out + start, dim);
        }
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) sum += x(v, j);
        const float center = row_sum(sum) / dim;
        x.keep_packed();
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
        x.keep_packed();
        x.set([&](int v, int j) { return (x(v, j) - center) * scale * w(v, j) + b(v, j); });
        x.store(out + start, dim);
    }
}

// dresidual is null where nothing arrives along the stream; dinp may be dresidual or dout: of a row, all is read before any is
// written. Beyond the row dout is zero, so that no sum needs a condition.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(512)
    layernorm_backward(T* dinp, float* partial_weight, float* partial_bias, const T* dresidual, const T* dout, const T* inp,
                       const T* weight, const float* mean, const float* rstd, int rows, int dim, int stages) {
    extern __shared__ float4 shared[];  // the queue's; where warps own rows, then (blockDim.y, dim) floats, which is less
    Row<T, SIZE, VECTORS> w;
    w.load(weight, dim);
    float dweight[VECTORS][SIZE] = {}, dbias[VECTORS][SIZE] = {};
    RowQueue<T, SIZE, VECTORS, 3> queue(shared, {inp, dout, dresidual}, rows, dim, stages);
    float next_center = 0.0f, next_scale = 0.0f;
    if (queue.row < rows) next_center = mean[queue.row], next_scale = rstd[queue.row];
    for (; queue.row < rows; queue.next()) {
        const float center = next_center, scale = next_scale;
        const int next = queue.row + queue.step();
        if (next < rows) next_center = mean[next], next_scale = rstd[next];
        queue.wait();
        Row<T, SIZE, VECTORS> x = queue.get(0), d = queue.get(1);
        w.keep_packed();
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
        const float2 sums = row_sums(sum, dot);
        const float shift = scale * (sums.x / dim), slope = scale * scale * (sums.y / dim);
        x.keep_packed();
        d.keep_packed();
        w.keep_packed();
        const auto stream = queue.get(2);
        x.set([&](int v, int j) {
            return (stream(v, j) - shift) - (x(v, j) - center) * slope + d(v, j) * w(v, j) * scale;
        });
        x.store(dinp + (long long)queue.row * dim, dim);
    }
    float* const of_warp = reinterpret_cast<float*>(shared);
    store_column_sums<SIZE, VECTORS>(partial_weight, of_warp, dweight, dim);
    store_column_sums<SIZE, VECTORS>(partial_bias, of_warp, dbias, dim);
}
