// Softmax and cross-entropy over the vocabulary. The probabilities are never stored.
//
//     nll     = log sum_v exp(logits[v]) - logits[target]
//     correct = no other token has a larger logit
//     dlogits[v] = weight * (exp(logits[v]) / sum_u exp(logits[u]) - [v is the target])
//
// Layout: logits of T (rows, width); nll, weight fp32, targets int32, correct bool, all (rows,).
//         Columns from vocab_size on are padding: the softmax ignores them, and their gradient is 0.
//         dlogits holds the logits on entry; the backward kernel overwrites them in place.
// Work: a block owns a row. Pass one finds the row's maximum and its sum of exponentials together
//       (online softmax). Pass two writes the gradient. It reads the row from shared memory if
//       the row fits there. If not, it reads global memory again. It runs backwards, so that it starts with
//       the columns still in cache.
// Saved: nothing. Precision: fp32, one rounding to T at the store.
// Determinism: every sum has a fixed order.
// Source: Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3 (maximum and sum in one pass).

#include "copies.cuh"
#include "vectors.cuh"

// The initial maximum, in place of -infinity: LOWEST - LOWEST is 0, but the difference of two infinities is
// NaN.
constexpr float LOWEST = -3.402823466e38f;
// Two blocks of this size fill an SM of 2048 threads, at 32 registers a thread. Their two rows of up to 100
// KB fit in shared memory: one block's loads overlap the other's arithmetic. Not tuned.
constexpr int MAX_BLOCK = 1024;

struct RowStatistics {
    float row_max, exp_sum;  // exp_sum: the sum of exp(logit - row_max)
};

// All threads of the block must call it; all get the same result. Its barriers also separate every thread's
// read of the row from any write after the call.
template <typename T, int SIZE>
RowStatistics row_statistics(const T* row, int vocab_size) {
    float thread_max = LOWEST, exp_sum = 0.0f;
    const int vectors = vocab_size / SIZE;
    Packed<T, SIZE> next;
    if ((int)threadIdx.x < vectors) next.load(row + threadIdx.x * SIZE);
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        const Packed<T, SIZE> v = next;
        // Prefetch the next vector while this one is summed.
        if (i + (int)blockDim.x < vectors) next.load(row + (i + blockDim.x) * SIZE);
        float new_max = thread_max;
#pragma unroll
        for (int j = 0; j < SIZE; j++) new_max = fmaxf(new_max, v(j));
        exp_sum *= exponential(thread_max - new_max);
        thread_max = new_max;
#pragma unroll
        for (int j = 0; j < SIZE; j++) exp_sum += exponential(v(j) - thread_max);
    }
    // The tail has fewer than SIZE columns. A block has at least 32 threads, so one column a thread is
    // enough.
    const int tail_column = vectors * SIZE + threadIdx.x;
    if (tail_column < vocab_size) {
        const float x = to_float(row[tail_column]), new_max = fmaxf(thread_max, x);
        exp_sum = exp_sum * exponential(thread_max - new_max) + exponential(x - new_max);
        thread_max = new_max;
    }
    const float row_max = block_reduce(thread_max, Max(), LOWEST);
    return {row_max, block_reduce(exp_sum * exponential(thread_max - row_max), Sum(), 0.0f)};
}

template <typename T, int SIZE>
__global__ void __launch_bounds__(MAX_BLOCK)
    cross_entropy_forward(float* nll, bool* correct, const T* logits, const int* targets, int width,
                          int vocab_size) {
    // rows * width passes 2^31 at 42,690 rows of 50,304.
    const T* row = logits + (long long)blockIdx.x * width;
    const RowStatistics s = row_statistics<T, SIZE>(row, vocab_size);
    if (threadIdx.x == 0) {
        const float target = to_float(row[targets[blockIdx.x]]);
        nll[blockIdx.x] = logf(s.exp_sum) + (s.row_max - target);
        correct[blockIdx.x] = target == s.row_max;
    }
}

// row_in_smem: whether the dynamic shared memory holds the whole row, width elements of T.
template <typename T, int SIZE>
__global__ void __launch_bounds__(MAX_BLOCK)
    cross_entropy_backward(T* dlogits, float* nll, const int* targets, const float* weight, int width,
                           int vocab_size, bool row_in_smem) {
    extern __shared__ uint4 smem[];
    T* const row = dlogits + (long long)blockIdx.x * width;
    const T* logits = row;
    if constexpr (SIZE * sizeof(T) == 16)
        if (row_in_smem) {
            T* const smem_row = reinterpret_cast<T*>(smem);
            for (int i = threadIdx.x * SIZE; i < width; i += blockDim.x * SIZE)
                cp_async(shared_address(smem_row + i), row + i, true);
            logits = smem_row;
        }
    const int target = targets[blockIdx.x];
    // The target's logit is read before the barriers in row_statistics. They separate it from the writes
    // below.
    const float target_logit = to_float(row[target]), row_weight = weight[blockIdx.x];
    cp_async_wait_all();
    __syncthreads();  // separates each thread's completed copies from the other threads' reads
    const RowStatistics s = row_statistics<T, SIZE>(logits, vocab_size);
    if (threadIdx.x == 0) nll[blockIdx.x] = logf(s.exp_sum) + (s.row_max - target_logit);
    const float scale = row_weight / s.exp_sum;
    for (int i = width / SIZE - 1 - (int)threadIdx.x; i >= 0; i -= blockDim.x) {
        Packed<T, SIZE> v;
        v.load(logits + i * SIZE);
        const int valid = vocab_size - i * SIZE;     // elements of this vector before the padding
        const int target_index = target - i * SIZE;  // the target's element, if it lies in this vector
        const auto gradient = [&](int j) { return exponential(v(j) - s.row_max) * scale; };
        if (valid >= SIZE && (target_index < 0 || target_index >= SIZE)) v.set(gradient);
        else v.set([&](int j) {
            const float d = gradient(j) - (j == target_index ? row_weight : 0.0f);
            return j < valid ? d : 0.0f;
        });
        v.store(row + i * SIZE);
    }
}
