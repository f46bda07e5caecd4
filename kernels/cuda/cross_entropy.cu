// Softmax and cross-entropy over the vocabulary. The probabilities are never stored.
//
//     z       = softcap * tanh(logits / softcap)                     (softcap 0: z = logits)
//     nll     = log sum_v exp(z[v]) - z[target]
//     correct = no other token has a larger logit
//     dz[v]   = weight * (exp(z[v]) / sum_u exp(z[u]) - [v is the target])
//     dlogits[v] = dz[v] * (1 - (z[v] / softcap)^2)                  (softcap 0: dlogits = dz)
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
// Source: Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3 (maximum and sum in one pass);
//         Gemma Team 2024, arXiv:2408.00118, section 2 (the cap).

#include "copies.cuh"
#include "vectors.cuh"

// The initial maximum, in place of -infinity: LOWEST - LOWEST is 0, but the difference of two infinities is
// NaN.
constexpr float LOWEST = -3.402823466e38f;
// Two blocks of this size fill an SM of 2048 threads, at 32 registers a thread. Their two rows of up to 100
// KB fit in shared memory: one block's loads overlap the other's arithmetic. Not tuned.
constexpr int MAX_BLOCK = 1024;

// z of a logit of T. Logits of bf16 take a tanh that is exact to 2^-21, at a third of the instructions.
template <typename T, bool CAPPED>
struct Cap {
    float softcap, inverse;

    explicit Cap(float softcap) : softcap(softcap), inverse(CAPPED ? 1 / softcap : 0.0f) {}

    float operator()(float x) const {
        if constexpr (!CAPPED) return x;
        else if constexpr (sizeof(T) == sizeof(float)) return softcap * tanhf(x * inverse);
        else return softcap * (1.0f - __fdividef(2.0f, 1.0f + exponential(2.0f * inverse * x)));
    }
    float slope(float z) const { return CAPPED ? 1.0f - z * inverse * (z * inverse) : 1.0f; }
};

struct RowStatistics {
    float row_max, z_max, exp_sum;  // row_max: the largest logit; exp_sum: the sum of exp(z - z_max)
};

// All threads of the block must call it; all get the same result. Its barriers also separate every thread's
// read of the row from any write after the call.
template <typename T, int SIZE, bool CAPPED>
RowStatistics row_statistics(const T* row, int vocab_size, const Cap<T, CAPPED>& cap) {
    float thread_max = LOWEST, z_max = cap(LOWEST), exp_sum = 0.0f;
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
        const float new_z_max = cap(new_max);
        exp_sum *= exponential(z_max - new_z_max);
        thread_max = new_max, z_max = new_z_max;
#pragma unroll
        for (int j = 0; j < SIZE; j++) exp_sum += exponential(cap(v(j)) - z_max);
    }
    // The tail has fewer than SIZE columns. A block has at least 32 threads, so one column a thread is
    // enough.
    const int tail_column = vectors * SIZE + threadIdx.x;
    if (tail_column < vocab_size) {
        const float x = to_float(row[tail_column]), new_max = fmaxf(thread_max, x), new_z_max = cap(new_max);
        exp_sum = exp_sum * exponential(z_max - new_z_max) + exponential(cap(x) - new_z_max);
        thread_max = new_max, z_max = new_z_max;
    }
    const float row_max = block_reduce(thread_max, Max(), LOWEST), row_z_max = cap(row_max);
    return {row_max, row_z_max, block_reduce(exp_sum * exponential(z_max - row_z_max), Sum(), 0.0f)};
}

template <typename T, int SIZE, bool CAPPED>
__global__ void __launch_bounds__(MAX_BLOCK)
    cross_entropy_forward(float* nll, bool* correct, const T* logits, const int* targets, int width,
                          int vocab_size, float softcap) {
    const Cap<T, CAPPED> cap(softcap);
    // rows * width passes 2^31 at 42,690 rows of 50,304.
    const T* row = logits + (long long)blockIdx.x * width;
    const RowStatistics s = row_statistics<T, SIZE>(row, vocab_size, cap);
    if (threadIdx.x == 0) {
        const float target = to_float(row[targets[blockIdx.x]]);
        nll[blockIdx.x] = logf(s.exp_sum) + (s.z_max - cap(target));
        correct[blockIdx.x] = target == s.row_max;
    }
}

// row_in_smem: whether the dynamic shared memory holds the whole row, width elements of T.
template <typename T, int SIZE, bool CAPPED>
__global__ void __launch_bounds__(MAX_BLOCK)
    cross_entropy_backward(T* dlogits, float* nll, const int* targets, const float* weight, int width,
                           int vocab_size, bool row_in_smem, float softcap) {
    extern __shared__ uint4 smem[];
    const Cap<T, CAPPED> cap(softcap);
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
    const float target_z = cap(to_float(row[target])), row_weight = weight[blockIdx.x];
    cp_async_wait_all();
    __syncthreads();  // separates each thread's completed copies from the other threads' reads
    const RowStatistics s = row_statistics<T, SIZE>(logits, vocab_size, cap);
    if (threadIdx.x == 0) nll[blockIdx.x] = logf(s.exp_sum) + (s.z_max - target_z);
    const float scale = row_weight / s.exp_sum;
    for (int i = width / SIZE - 1 - (int)threadIdx.x; i >= 0; i -= blockDim.x) {
        Packed<T, SIZE> v;
        v.load(logits + i * SIZE);
        const int valid = vocab_size - i * SIZE;     // elements of this vector before the padding
        const int target_index = target - i * SIZE;  // the target's element, if it lies in this vector
        const auto gradient = [&](int j) {
            const float z = cap(v(j));
            return exponential(z - s.z_max) * scale * cap.slope(z);
        };
        if (valid >= SIZE && (target_index < 0 || target_index >= SIZE)) v.set(gradient);
        else v.set([&](int j) {
            const float d = gradient(j) - (j == target_index ? row_weight * cap.slope(target_z) : 0.0f);
            return j < valid ? d : 0.0f;
        });
        v.store(row + i * SIZE);
    }
}
