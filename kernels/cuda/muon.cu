// Muon's update of the matrices (m, n) of all layers. The op matmul runs between these kernels.
//
//     g       = grads * min(1, grad_clip / grad_norm)              (grad_clip 0: no clipping)
//     exp_avg = momentum * exp_avg + (1 - momentum) * g            muon_momentum, with partial sums of u^2
//     u       = momentum * exp_avg + (1 - momentum) * g            (Nesterov momentum)
//     x       = u / sqrt(sum of u^2), rounded to T                 muon_begin; 0 if u is 0
//     poly    = a I + b gram + c gram^2, rounded to T              muon_polynomial, once per iteration
//     params  = params * (1 - lr * weight_decay) - lr * scale * x  muon_apply
//     compute_weights = params, rounded to T                       muon_apply, if not null
//
// If grad_norm is not finite, the kernels write neither exp_avg nor params nor compute_weights.
//
// Layout: params, exp_avg, grads fp32 and compute_weights of T: slices of flat arrays, at any alignment.
//         One layer's matrices, `size` elements each, are contiguous. Layers lie `stride` elements apart.
//         x (matrices, size), gram and poly (matrices, side, side), all of T and contiguous.
//         partial fp32, one element per chunk of CHUNK elements. grad_norm and lr fp64, 0-d.
// Work: grid (chunks, matrices per layer, layers): a block owns one chunk of one matrix.
//       muon_polynomial: grid (side, matrices): a block owns one row.
// Precision: fp64 for the scalars and for sums across chunks. fp32 within a chunk and for the elements.
//            One rounding to T.
// Determinism: the chunk size and the order of every sum are fixed, on any GPU.
// Source: see kernels/cpu/muon.py.

#include "reduce.cuh"

constexpr int BLOCK = 256, CHUNK = 4096;  // not tuned

// The index of the block's matrix among all layers' matrices.
inline unsigned matrix_index() { return blockIdx.z * gridDim.y + blockIdx.y; }

// The offset of the block's matrix in the flat arrays. It may pass 2^31.
inline long long matrix_offset(unsigned size, long long stride) {
    return blockIdx.z * stride + (long long)blockIdx.y * size;
}

// The gradient's clipping factor. The norm must be finite.
inline float clip_factor(double norm, double grad_clip) {
    return grad_clip > 0 && norm > 0 ? (float)fmin(1.0, grad_clip / norm) : 1.0f;
}

// Interpolates between the average and g. Applied twice, it gives exp_avg and then u. Two kernels compute u:
// muon_momentum sums its squares, muon_begin scales it by the root of their sum.
inline float lerp(float average, float g, double momentum) {
    return (float)momentum * average + (float)(1 - momentum) * g;
}

__global__ void __launch_bounds__(BLOCK)
    muon_momentum(float* exp_avg, float* partial, const float* grads, const double* grad_norm, unsigned size,
                  long long stride, double momentum, double grad_clip) {
    const double norm = *grad_norm;
    if (!isfinite(norm)) return;  // the whole grid returns
    exp_avg += matrix_offset(size, stride), grads += matrix_offset(size, stride);
    const float clip = clip_factor(norm, grad_clip);
    const unsigned end = min(size, (blockIdx.x + 1) * CHUNK);
    float sum = 0.0f;
    for (unsigned i = blockIdx.x * CHUNK + threadIdx.x; i < end; i += BLOCK) {
        const float g = clip * grads[i], average = lerp(exp_avg[i], g, momentum);
        const float u = lerp(average, g, momentum);
        exp_avg[i] = average;
        sum += u * u;
    }
    sum = block_reduce(sum, Sum(), 0.0f);
    if (threadIdx.x == 0) partial[matrix_index() * gridDim.x + blockIdx.x] = sum;
}

template <typename T>
__global__ void __launch_bounds__(BLOCK)
    muon_begin(T* x, const float* exp_avg, const float* grads, const float* partial, const double* grad_norm,
               unsigned size, long long stride, double momentum, double grad_clip) {
    const double norm = *grad_norm;
    if (!isfinite(norm)) return;  // the whole grid returns; x stays stale, and muon_apply will not read it
    exp_avg += matrix_offset(size, stride), grads += matrix_offset(size, stride);
    x += (long long)matrix_index() * size;
    double sum = 0.0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += BLOCK) sum += partial[matrix_index() * gridDim.x + i];
    sum = block_reduce(sum, Sum(), 0.0);
    const float clip = clip_factor(norm, grad_clip), inverse_norm = sum > 0 ? (float)(1 / sqrt(sum)) : 0.0f;
    const unsigned end = min(size, (blockIdx.x + 1) * CHUNK);
    for (unsigned i = blockIdx.x * CHUNK + threadIdx.x; i < end; i += BLOCK)
        x[i] = from_float<T>(lerp(exp_avg[i], clip * grads[i], momentum) * inverse_norm);
}

// poly holds gram^2 on entry.
template <typename T>
__global__ void __launch_bounds__(BLOCK)
    muon_polynomial(T* poly, const T* gram, unsigned side, float a, float b, float c) {
    const unsigned row = blockIdx.x;
    poly += (long long)blockIdx.y * side * side, gram += (long long)blockIdx.y * side * side;
    for (unsigned j = threadIdx.x; j < side; j += BLOCK) {
        const unsigned i = row * side + j;  // side^2 is at most a matrix's size, so it fits
        poly[i] = from_float<T>((j == row ? a : 0.0f) + b * to_float(gram[i]) + c * to_float(poly[i]));
    }
}

template <typename T>
__global__ void __launch_bounds__(BLOCK)
    muon_apply(float* params, T* compute_weights, const T* x, const double* grad_norm, const double* lr,
               unsigned size, long long stride, double scale, double weight_decay) {
    if (!isfinite(*grad_norm)) return;  // the whole grid returns
    params += matrix_offset(size, stride);
    compute_weights += compute_weights ? matrix_offset(size, stride) : 0;
    x += (long long)matrix_index() * size;
    const float decay_factor = (float)(1 - *lr * weight_decay), step_size = (float)(*lr * scale);
    const unsigned end = min(size, (blockIdx.x + 1) * CHUNK);
    for (unsigned i = blockIdx.x * CHUNK + threadIdx.x; i < end; i += BLOCK) {
        const float p = params[i] * decay_factor - step_size * to_float(x[i]);
        params[i] = p;
        if (compute_weights) compute_weights[i] = from_float<T>(p);
    }
}
