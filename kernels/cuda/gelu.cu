// GELU in GPT-2's tanh form, written with a sigmoid: (1 + tanh(u)) / 2 = sigmoid(2 u).
//
//     z = 2 sqrt(2 / pi) (x + 0.044715 x^3)             s = sigmoid(z)
//     out  = x * s
//     dinp = dout * (s + x * s * (1 - s) * z')          z' = 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
//
// Layout: any number of elements of T, in order.
// Work: a thread owns VECTORS vectors of SIZE elements, blockDim.x vectors apart. It loads all of them first.
// Precision: fp32 arithmetic, one rounding to T at the store. The exponential (reduce.cuh) and the reciprocal
//            (activation.cuh) are approximate, to a few units in fp32's last place.
// Determinism: elements are independent.
// Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.

#include "activation.cuh"
#include "vectors.cuh"

// count: the number of vectors, below 2^32. Element offsets may pass 2^31 and are long long.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(256) gelu_forward(T* out, const T* inp, unsigned count) {
    const unsigned first = blockIdx.x * blockDim.x * VECTORS + threadIdx.x;
    Packed<T, SIZE> x[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (first + v * blockDim.x < count) x[v].load(inp + (long long)(first + v * blockDim.x) * SIZE);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (first + v * blockDim.x >= count) return;
        x[v].set([&](int j) { return x[v](j) * sigmoid_of_cubic(x[v](j)); });
        x[v].store(out + (long long)(first + v * blockDim.x) * SIZE);
    }
}

// dinp may be dout: a thread reads its elements before it writes them. count: as above.
template <typename T, int SIZE, int VECTORS>
__global__ void __launch_bounds__(256) gelu_backward(T* dinp, const T* dout, const T* inp, unsigned count) {
    const unsigned first = blockIdx.x * blockDim.x * VECTORS + threadIdx.x;
    Packed<T, SIZE> x[VECTORS], d[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (first + v * blockDim.x < count) {
            x[v].load(inp + (long long)(first + v * blockDim.x) * SIZE);
            d[v].load(dout + (long long)(first + v * blockDim.x) * SIZE);
        }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (first + v * blockDim.x >= count) return;
        d[v].set([&](int j) { return d[v](j) * gelu_slope(x[v](j)); });
        d[v].store(dinp + (long long)(first + v * blockDim.x) * SIZE);
    }
}
