// Tokens that sampling must not draw: their logits become -infinity, which is no candidate there.
//
// Layout: logits (B, width) of T, ids (count,) int32. Work: grid (blocks of ids, B), a thread owns one id of one row.
// Determinism: an id that comes twice is written twice with the same value.

#include "reduce.cuh"

template <typename T>
__global__ void suppress_tokens(T* logits, const int* ids, int width, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) logits[(long long)blockIdx.y * width + ids[i]] = from_float<T>(__int_as_float(0xff800000));
}
