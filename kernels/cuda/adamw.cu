// AdamW over the flat arrays of parameters, gradients and moments. One launch updates all tensors.
//
//     g               = grads * min(1, grad_clip / grad_norm)          (grad_clip 0: no clipping)
//     exp_avg         = beta1 * exp_avg + (1 - beta1) * g
//     exp_avg_sq      = beta2 * exp_avg_sq + (1 - beta2) * g^2
//     rate            = lr * the group's scale                          (groups: kernels/parameters.py)
//     params          = params * (1 - rate * weight_decay)             (segments flagged DECAYS only)
//                       - rate / (1 - beta1^step) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2^step)) + eps)
//     compute_weights = params, rounded to T                           (if not null)
//     grads           = 0                                              (segments flagged ZERO_GRAD only)
//
// If grad_norm is not finite, the kernel writes nothing. Segments flagged MUON are left to muon.cu.
//
// Layout: params, exp_avg, exp_avg_sq, grads fp32 and compute_weights of T, all (size,), 16-byte aligned.
//         flags uint8, one per segment of elements. grad_norm and lr fp64, step int64, all 0-d.
// Work: a grid-stride loop over vectors of SIZE elements. A thread reads and writes each array once.
// Precision: fp64 for the scalars, computed once per block. fp32 for the elements, one rounding to T.
// Determinism: elements are independent.
// Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.

#include "reduce.cuh"

// Bits of a flag, and where the index of the group begins, as in kernels/parameters.py.
constexpr unsigned DECAYS = 1, ZERO_GRAD = 2, MUON = 4, GROUP_SHIFT = 3, GROUPS = 4;

struct Scalars {
    float clip, inverse_correction2, step_size[GROUPS], decay_factor[GROUPS];
};

// vectors: the number of vectors. segment_vectors: vectors per flag.
template <typename T, int SIZE>
__global__ void __launch_bounds__(256)
    adamw(float* params, float* exp_avg, float* exp_avg_sq, float* grads, T* compute_weights,
          const unsigned char* flags, const double* grad_norm, const double* lr, const long long* step,
          unsigned vectors, unsigned segment_vectors, double beta1, double beta2, double eps,
          double weight_decay, double grad_clip, double matrix_scale, double embedding_scale,
          double head_scale, double vector_scale) {
    const double norm = *grad_norm;
    if (!isfinite(norm)) return;  // the whole grid returns
    __shared__ Scalars scalars;
    if (threadIdx.x == 0) {
        const double t = (double)*step, rate = *lr;
        scalars.clip = grad_clip > 0 && norm > 0 ? (float)fmin(1.0, grad_clip / norm) : 1.0f;
        scalars.inverse_correction2 = (float)(1 / (1 - pow(beta2, t)));
        const double scales[GROUPS] = {matrix_scale, embedding_scale, head_scale, vector_scale};
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            scalars.step_size[i] = (float)(rate * scales[i] / (1 - pow(beta1, t)));
            scalars.decay_factor[i] = (float)(1 - rate * scales[i] * weight_decay);
        }
    }
    __syncthreads();  // separates thread 0's write of the scalars from every thread's read
    const float clip = scalars.clip, inverse_correction2 = scalars.inverse_correction2;
    const float beta1_fp32 = (float)beta1, rest1 = (float)(1 - beta1), beta2_fp32 = (float)beta2;
    const float rest2 = (float)(1 - beta2), eps_fp32 = (float)eps;
    using Floats = Vector<float, SIZE>;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * blockDim.x) {
        const unsigned flag = flags[i / segment_vectors];
        if (flag & MUON) continue;
        Floats p = reinterpret_cast<Floats*>(params)[i], g = reinterpret_cast<Floats*>(grads)[i];
        Floats first = reinterpret_cast<Floats*>(exp_avg)[i];
        Floats second = reinterpret_cast<Floats*>(exp_avg_sq)[i];
        const unsigned group = flag >> GROUP_SHIFT;
        const float decay_factor = flag & DECAYS ? scalars.decay_factor[group] : 1.0f;
        const float step_size = scalars.step_size[group];
        Vector<T, SIZE> rounded;
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            const float clipped = g.element[j] * clip;
            const float m = beta1_fp32 * first.element[j] + rest1 * clipped;
            const float v = beta2_fp32 * second.element[j] + rest2 * clipped * clipped;
            p.element[j] = p.element[j] * decay_factor
                           - step_size * m / (sqrtf(v * inverse_correction2) + eps_fp32);
            first.element[j] = m;
            second.element[j] = v;
            g.element[j] = 0.0f;
            rounded.element[j] = from_float<T>(p.element[j]);
        }
        reinterpret_cast<Floats*>(params)[i] = p;
        reinterpret_cast<Floats*>(exp_avg)[i] = first;
        reinterpret_cast<Floats*>(exp_avg_sq)[i] = second;
        if (flag & ZERO_GRAD) reinterpret_cast<Floats*>(grads)[i] = g;
        if (compute_weights) reinterpret_cast<Vector<T, SIZE>*>(compute_weights)[i] = rounded;
    }
}
