// Muon's update of matrices (m, n) of all layers; the products between these kernels are those of the operation matmul.
//
//     g       = grads * min(1, grad_clip / grad_norm)              (no clipping where grad_clip is 0)
//     exp_avg = momentum * exp_avg + (1 - momentum) * g            muon_momentum, which also sums u^2
//     u       = momentum * exp_avg + (1 - momentum) * g            by muon_begin
//     x       = u / sqrt(sum of u^2), rounded to T                 muon_begin; 0 where u is 0
//     poly  = a I + b gram + c poly, rounded to T              muon_polynomial, once an iteration
//     params  = params * (1 - lr * weight_decay) - lr * scale * x  muon_apply
//     compute_weights    = params, rounded to T                               (where there is a compute_weights)
//
// Where grad_norm is not finite neither exp_avg nor params nor compute_weights is written.
//
// Layout: params, exp_avg, grads fp32 and compute_weights of T, parts of flat arrays: a layer's matrices, of `size` elements, lie side by side,
//         layers `stride` elements apart; they begin anywhere, as rows of a parameter may be a matrix. Back to back, matrix by matrix:
//         x (size,), gram and poly (side, side), of T; partial fp32, one for each CHUNK elements. grad_norm and lr fp64, ().
// Work: a block owns a chunk of CHUNK elements of matrix blockIdx.y of layer blockIdx.z, a thread every BLOCKth of it; of
//       muon_polynomial a block owns a row of matrix blockIdx.y of all.
// Precision: what is the same for all elements is computed in fp64, once a thread; squares are summed in fp32 within a chunk, in
//            fp64 across; all else in fp32, one rounding to T.
// Determinism: chunks have a fixed size and sums a fixed order, whatever the GPU; otherwise no element depends on another.
// Source: see kernels/cpu/muon.py.

#include "reduce.cuh"

constexpr int BLOCK = 256, CHUNK = 4096;  // not tuned

// Which of all matrices a block's is.
inline unsigned matrix() { return blockIdx.z * gridDim.y + blockIdx.y; }

// Where it begins in the flat arrays, which may have more than 2^31 elements.
inline long long place(unsigned size, long long stride) { return blockIdx.z * stride + (long long)blockIdx.y * size; }

// What the gradient is multiplied by. Only where the norm is finite.
inline float clipping(double norm, double grad_clip) {
    return grad_clip > 0 && norm > 0 ? (float)fmin(1.0, grad_clip / norm) : 1.0f;
}

// The two kernels that need u compute it alike, one after writing the new average, one from it.
inline float ahead(float average, float g, double momentum) {
    return (float)momentum * average + (float)(1 - momentum) * g;
}

__global__ void __launch_bounds__(BLOCK)
    muon_momentum(float* exp_avg, float* partial, const float* grads, const double* grad_norm, unsigned size, long long stride,
                  double momentum, double grad_clip) {
    const double norm = *grad_norm;
    if (!isfinite(norm)) return;  // the whole grid
    exp_avg += place(size, stride), grads += place(size, stride);
    const float clip = clipping(norm, grad_clip);
    const unsigned end = min(size, (blockIdx.x + 1) * CHUNK);
    float sum = 0.0f;
    for (unsigned i = blockIdx.x * CHUNK + threadIdx.x; i < end; i += BLOCK) {
        const float g = clip * grads[i], average = ahead(exp_avg[i], g, momentum), u = ahead(average, g, momentum);
        exp_avg[i] = average;
        sum += u * u;
    }
    sum = block_reduce(sum, Sum(), 0.0f);
    if (threadIdx.x == 0) partial[matrix() * gridDim.x + blockIdx.x] = sum;
}

template <typename T>
__global__ void __launch_bounds__(BLOCK)
    muon_begin(T* x, const float* exp_avg, const float* grads, const float* partial, const double* grad_norm, unsigned size,
               long long stride, double momentum, double grad_clip) {
    const double norm = *grad_norm;
    if (!isfinite(norm)) return;  // the whole grid; x is of some earlier update, and muon_apply will not read it
    exp_avg += place(size, stride), grads += place(size, stride), x += (long long)matrix() * size;
    double sum = 0.0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += BLOCK) sum += partial[matrix() * gridDim.x + i];
    sum = block_reduce(sum, Sum(), 0.0);
    const float clip = clipping(norm, grad_clip), inverse = sum > 0 ? (float)(1 / sqrt(sum)) : 0.0f;
    const unsigned end = min(size, (blockIdx.x + 1) * CHUNK);
    for (unsigned i = blockIdx.x * CHUNK + threadIdx.x; i < end; i += BLOCK)
        x[i] = from_float<T>(ahead(exp_avg[i], clip * grads[i], momentum) * inverse);
}

template <typename T>
__global__ void __launch_bounds__(BLOCK) muon_polynomial(T* poly, const T* gram, unsigned side, float a, float b, float c) {
    const unsigned row = blockIdx.x;
    poly += (long long)blockIdx.y * side * side, gram += (long long)blockIdx.y * side * side;
    for (unsigned j = threadIdx.x; j < side; j += BLOCK) {
        const unsigned i = row * side + j;  // side^2 is at most a matrix's size, which fits
        poly[i] = from_float<T>((j == row ? a : 0.0f) + b * to_float(gram[i]) + c * to_float(poly[i]));
    }
}

template <typename T>
__global__ void __launch_bounds__(BLOCK)
    muon_apply(float* params, T* compute_weights, const T* x, const double* grad_norm, const double* lr, unsigned size,
               long long stride, double scale, double weight_decay) {
    if (!isfinite(*grad_norm)) return;  // the whole grid
    params += place(size, stride), compute_weights += compute_weights ? place(size, stride) : 0, x += (long long)matrix() * size;
    const float keep = (float)(1 - *lr * weight_decay), rate = (float)(*lr * scale);
    const unsigned end = min(size, (blockIdx.x + 1) * CHUNK);
    for (unsigned i = blockIdx.x * CHUNK + threadIdx.x; i < end; i += BLOCK) {
        const float p = params[i] * keep - rate * to_float(x[i]);
        params[i] = p;
        if (compute_weights) compute_weights[i] = from_float<T>(p);
    }
}
