// The copy of the parameters that products read.
//
//     out = inp, rounded to T
//
// Layout: inp fp32 and out of T, any number of elements in order. Work: a thread owns a vector of SIZE elements.
// Precision: one rounding, to nearest, ties to even, as the update's (adamw.cu).

#include "vectors.cuh"

// count: of vectors, below 2^31; elements beyond 2^31 are reached by long long.
template <typename T, int SIZE>
__global__ void __launch_bounds__(256) cast(T* out, const float* inp, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float x[SIZE];
    load_floats(x, inp + (long long)i * SIZE);
    Packed<T, SIZE> rounded;
    rounded.set([&](int j) { return x[j]; });
    rounded.store(out + (long long)i * SIZE);
}
