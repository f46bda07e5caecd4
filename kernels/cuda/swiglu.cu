// SwiGLU: SiLU of the gate times the linear half.
//
//     s = sigmoid(gate)                                 out = gate * s * up
//     dgate = dout * up * s * (1 + gate * (1 - s))      dup = dout * gate * s
//
// Layout: inp and dinp (rows, 2 width): columns 0 .. width - 1 are the gate, the others up.
//         out and dout (rows, width). All of T.
// Work: a thread owns a vector of SIZE columns of a row of out, and the matching gate and up vectors of inp.
// Precision: fp32 arithmetic, one rounding to T at each store. The exponential (reduce.cuh) and the
//            reciprocal (activation.cuh) are approximate, to a few units in fp32's last place.
// Determinism: elements are independent.
// Source: Shazeer 2020, arXiv:2002.05202, equation 6.

#include "activation.cuh"
#include "vectors.cuh"

// count: the number of out's vectors, below 2^32. Element offsets may pass 2^31 and are long long.
// row_vectors: width / SIZE.
template <typename T, int SIZE>
__global__ void __launch_bounds__(256)
    swiglu_forward(T* out, const T* inp, unsigned count, unsigned row_vectors) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const unsigned row = i / row_vectors;
    const T* const gate_inp = inp + ((long long)row * row_vectors + i) * SIZE;  // row * 2 width + column
    Packed<T, SIZE> gate, up;
    gate.load(gate_inp);
    up.load(gate_inp + (long long)row_vectors * SIZE);
    gate.set([&](int j) { return gate(j) * sigmoid(gate(j)) * up(j); });
    gate.store(out + (long long)i * SIZE);
}

// dinp may be inp: a thread reads its elements before it writes them. count, row_vectors: as above.
template <typename T, int SIZE>
__global__ void __launch_bounds__(256)
    swiglu_backward(T* dinp, const T* dout, const T* inp, unsigned count, unsigned row_vectors) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const unsigned row = i / row_vectors;
    const long long gate_offset = ((long long)row * row_vectors + i) * SIZE;  // row * 2 width + column
    const long long up_offset = gate_offset + (long long)row_vectors * SIZE;
    Packed<T, SIZE> gate, up, d, dgate, dup;
    gate.load(inp + gate_offset);
    up.load(inp + up_offset);
    d.load(dout + (long long)i * SIZE);
    dgate.set([&](int j) {
        const float s = sigmoid(gate(j));
        return d(j) * up(j) * s * (1.0f + gate(j) * (1.0f - s));
    });
    dup.set([&](int j) { return d(j) * gate(j) * sigmoid(gate(j)); });
    dgate.store(dinp + gate_offset);
    dup.store(dinp + up_offset);
}
