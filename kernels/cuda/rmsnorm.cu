// RMSNorm, alone and with the residual addition in front of it (one Euler step of the stream).
//
//     x = inp, or residual + branch                     (rounded to T, as it is kept)
//     rstd = 1 / sqrt(mean(x^2) + eps)                  out = x * rstd * weight
//
// With xhat = x * rstd and g = dout * weight:
//
//     dinp     = rstd * (g - xhat * mean(g * xhat)) (+ dresidual, what arrives along the stream)
//     dweight += sum over rows of dout * xhat
//
// Layout: activations and weight of T, (rows, dim) and (dim,); rstd (rows,) and dweight (dim,) fp32.
// Work: forward, a block owns a row. Backward, block g owns the rows g, g + gridDim.x, ... and keeps its share of dweight in shared
//       memory, an element a thread, then in row g of `partial`; the second kernel adds those rows up, a thread a column.
// Saved: rstd, and the sum where there is one. Precision: fp32 arithmetic, one rounding to T at each store.
// Determinism: every sum has a fixed order; no atomics.
// Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.

#include "reduce.cuh"

template <typename T>
__global__ void rmsnorm_forward(T* out, float* rstd, const T* inp, const T* weight, int dim, float eps) {
    const long long start = (long long)blockIdx.x * dim;
    float square_sum = 0.0f;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        const float x = to_float(inp[start + i]);
        square_sum += x * x;
    }
    const float scale = rsqrtf(block_reduce(square_sum, Sum(), 0.0f) / dim + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
    for (int i = threadIdx.x; i < dim; i += blockDim.x)
        out[start + i] = from_float<T>(to_float(inp[start + i]) * scale * to_float(weight[i]));
}

template <typename T>
__global__ void residual_rmsnorm_forward(T* residual_out, T* out, float* rstd, const T* residual, const T* branch, const T* weight,
                                         int dim, float eps) {
    const long long start = (long long)blockIdx.x * dim;
    float square_sum = 0.0f;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        const T sum = from_float<T>(to_float(residual[start + i]) + to_float(branch[start + i]));
        residual_out[start + i] = sum;
        square_sum += to_float(sum) * to_float(sum);
    }
    const float scale = rsqrtf(block_reduce(square_sum, Sum(), 0.0f) / dim + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
    for (int i = threadIdx.x; i < dim; i += blockDim.x)  // each thread reads back what it wrote itself
        out[start + i] = from_float<T>(to_float(residual_out[start + i]) * scale * to_float(weight[i]));
}

// dresidual is null where nothing arrives along the stream; dinp may be dresidual or dout.
template <typename T>
__global__ void rmsnorm_backward(T* dinp, float* partial, const T* dresidual, const T* dout, const T* inp, const T* weight,
                                 const float* rstd, int rows, int dim) {
    extern __shared__ float dweight[];  // (dim,)
    for (int i = threadIdx.x; i < dim; i += blockDim.x) dweight[i] = 0.0f;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const long long start = (long long)row * dim;
        const float scale = rstd[row];
        float dot = 0.0f;
        for (int i = threadIdx.x; i < dim; i += blockDim.x)
            dot += to_float(dout[start + i]) * to_float(weight[i]) * to_float(inp[start + i]);
        const float shift = block_reduce(dot, Sum(), 0.0f) * scale * scale * scale / dim;
        for (int i = threadIdx.x; i < dim; i += blockDim.x) {
            const float d = to_float(dout[start + i]), x = to_float(inp[start + i]);
            dweight[i] += d * x * scale;  // thread i alone touches column i
            float dx = d * to_float(weight[i]) * scale - x * shift;
            if (dresidual) dx += to_float(dresidual[start + i]);
            dinp[start + i] = from_float<T>(dx);
        }
    }
    for (int i = threadIdx.x; i < dim; i += blockDim.x) partial[(long long)blockIdx.x * dim + i] = dweight[i];
}
