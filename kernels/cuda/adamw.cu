// AdamW over the flat arrays of parameters, gradients and moments, all tensors in one kernel.
//
//     g           = grads * min(1, grad_clip / grad_norm)          (no clipping where grad_clip is 0)
//     exp_avg     = beta1 * exp_avg + (1 - beta1) * g
//     exp_avg_sq  = beta2 * exp_avg_sq + (1 - beta2) * g^2
//     params      = params * (1 - lr * weight_decay)               (where the parameter decays)
//                   - lr / (1 - beta1^step) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2^step)) + eps)
//     compute_weights        = params, rounded to T                           (where there is a compute_weights)
//     grads       = 0                                              (where it is cleared)
//
// Where grad_norm is not finite nothing is written, nor where a run is Muon's (muon.cu).
//
// Layout: params, exp_avg, exp_avg_sq, grads fp32 and compute_weights of T, all (size,), beginning at a multiple of 16 bytes; flags uint8,
//         one for each `run` elements, of DECAYS, CLEARED and MUON; grad_norm and lr fp64 and step int64, ().
// Work: a thread owns the vectors i, i + threads of the grid, ... Every array is read and written once, but for gradients that
//       stay.
// Precision: what is the same for all elements is computed in fp64, once a block; the rest in fp32, one rounding to T.
// Determinism: no element depends on another.
// Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.

#include "reduce.cuh"

constexpr unsigned DECAYS = 1, CLEARED = 2, MUON = 4;  // those of kernels/parameters.py

struct Scalars {
    float clip, rate, inverse2, keep;
};

template <typename T, int SIZE>
__global__ void __launch_bounds__(256)
    adamw(float* params, float* exp_avg, float* exp_avg_sq, float* grads, T* compute_weights, const unsigned char* flags,
          const double* grad_norm, const double* lr, const long long* step, unsigned vectors, unsigned run, double beta1,
          double beta2, double eps, double weight_decay, double grad_clip) {
    const double norm = *grad_norm;
    if (!isfinite(norm)) return;  // the whole grid
    __shared__ Scalars scalars;
    if (threadIdx.x == 0) {
        const double count = (double)*step, rate = *lr;
        scalars.clip = grad_clip > 0 && norm > 0 ? (float)fmin(1.0, grad_clip / norm) : 1.0f;
        scalars.rate = (float)(rate / (1 - pow(beta1, count)));
        scalars.inverse2 = (float)(1 / (1 - pow(beta2, count)));
        scalars.keep = (float)(1 - rate * weight_decay);
    }
    __syncthreads();  // thread 0 has written what all read
    const Scalars s = scalars;
    const float first_kept = (float)beta1, first_new = (float)(1 - beta1), second_kept = (float)beta2;
    const float second_new = (float)(1 - beta2), tiny = (float)eps;
    using Floats = Vector<float, SIZE>;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * blockDim.x) {
        const unsigned flag = flags[i / run];
        if (flag & MUON) continue;
        Floats p = reinterpret_cast<Floats*>(params)[i], g = reinterpret_cast<Floats*>(grads)[i];
        Floats first = reinterpret_cast<Floats*>(exp_avg)[i], second = reinterpret_cast<Floats*>(exp_avg_sq)[i];
        const float shrink = flag & DECAYS ? s.keep : 1.0f;
        Vector<T, SIZE> c;
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            const float clipped = g.element[j] * s.clip;
            const float m = first_kept * first.element[j] + first_new * clipped;
            const float v = second_kept * second.element[j] + second_new * clipped * clipped;
            p.element[j] = p.element[j] * shrink - s.rate * m / (sqrtf(v * s.inverse2) + tiny);
            first.element[j] = m;
            second.element[j] = v;
            g.element[j] = 0.0f;
            c.element[j] = from_float<T>(p.element[j]);
        }
        reinterpret_cast<Floats*>(params)[i] = p;
        reinterpret_cast<Floats*>(exp_avg)[i] = first;
        reinterpret_cast<Floats*>(exp_avg_sq)[i] = second;
        if (flag & CLEARED) reinterpret_cast<Floats*>(grads)[i] = g;
        if (compute_weights) reinterpret_cast<Vector<T, SIZE>*>(compute_weights)[i] = c;
    }
}
