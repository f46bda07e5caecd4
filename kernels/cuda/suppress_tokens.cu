// Bans tokens from sampling: their logits become -infinity, and sample.cu skips such logits.
//
// Layout: logits (B, width) of T, ids (count,) int32.
// Work: grid (blocks of ids, B); a thread writes the logit of one id in one row.
// Determinism: a repeated id is written several times with the same value.

#include "reduce.cuh"

template <typename T>
__global__ void suppress_tokens(T* logits, const int* ids, int width, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) logits[(long long)blockIdx.y * width + ids[i]] = from_float<T>(__int_as_float(0xff800000));
}
