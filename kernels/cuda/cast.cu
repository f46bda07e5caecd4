// Rounds the fp32 parameters to the compute weights of the matmuls.
//
//     out = inp, rounded to T
//
// Layout: inp fp32 and out of T, any number of elements in order.
// Work: a thread owns a vector of SIZE elements.
// Precision: one rounding, to nearest, ties to even, as in adamw.cu and muon.cu.
// Determinism: elements are independent.

#include "vectors.cuh"

// count: the number of vectors, below 2^31. Element offsets may pass 2^31 and are long long.
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
