// SwiGLU: a gate through SiLU times a linear half.
//
//     s = sigmoid(gate)                                 out = gate * s * up
//     dgate = dout * up * s * (1 + gate * (1 - s))      dup = dout * gate * s
//
// Layout: inp and dinp (rows, 2 width), the gate in the first half of a row; out and dout (rows, width); all of T.
// Work: a thread owns a vector of SIZE columns of a row of out, and the two of inp that belong to it.
// Precision: fp32 arithmetic, the exponential (reduce.cuh) and the quotient to a few units of fp32, one rounding to T at each store.
// Source: Shazeer 2020, arXiv:2002.05202, equation 6.

#include "activation.cuh"
#include "vectors.cuh"

// count: of out's vectors, below 2^32; elements beyond 2^31 are reached by long long. row_vectors: width / SIZE.
template <typename T, int SIZE>
__global__ void __launch_bounds__(256) swiglu_forward(T* out, const T* inp, unsigned count, unsigned row_vectors) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const unsigned row = i / row_vectors;
    const T* const first = inp + ((long long)row * row_vectors + i) * SIZE;  // row * 2 width + column
    Packed<T, SIZE> gate, up;
    gate.load(first);
    up.load(first + (long long)row_vectors * SIZE);
    gate.set([&](int j) { return gate(j) * sigmoid(gate(j)) * up(j); });
    gate.store(out + (long long)i * SIZE);
}

template <typename T, int SIZE>
__global__ void __launch_bounds__(256)
    swiglu_backward(T* dinp, const T* dout, const T* inp, unsigned count, unsigned row_vectors) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const unsigned row = i / row_vectors;
    const long long first = ((long long)row * row_vectors + i) * SIZE;  // row * 2 width + column
    const long long second = first + (long long)row_vectors * SIZE;
    Packed<T, SIZE> gate, up, d, dgate, dup;
    gate.load(inp + first);
    up.load(inp + second);
    d.load(dout + (long long)i * SIZE);
    dgate.set([&](int j) {
        const float s = sigmoid(gate(j));
        return d(j) * up(j) * s * (1.0f + gate(j) * (1.0f - s));
    });
    dup.set([&](int j) { return d(j) * gate(j) * sigmoid(gate(j)); });
    dgate.store(dinp + first);
    dup.store(dinp + second);
}
