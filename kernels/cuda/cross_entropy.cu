// Softmax and cross-entropy over the vocabulary; the probabilities are never stored.
//
//     nll     = log sum_v exp(logits[v]) - logits[target]
//     correct = no other token has a larger logit
//     dlogits[v] = weight * (exp(logits[v]) / sum_u exp(logits[u]) - [v is the target])
//
// Layout: logits of T (rows, width), of which columns from vocab_size on are padding: they take no part, and their gradient is 0;
//         nll and weight fp32, targets int32, correct bool, all (rows,). dlogits holds the logits on entry: in place.
// Work: a block owns a row. One read finds maximum and sum together, each thread rescaling its sum whenever its maximum grows;
//       a second writes the gradient: of the row held in shared memory, or where that takes no two rows of the caches, backwards,
//       so that it begins with what they still hold.
// Saved: nothing. Precision: fp32, one rounding to T at the store. Determinism: every sum has a fixed order.
// Source: Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3 (maximum and sum in one pass).

#include "copies.cuh"
#include "vectors.cuh"

// Stands for -infinity as the first maximum: the difference of two of these is 0 where that of two infinities is NaN.
constexpr float LOWEST = -3.402823466e38f;
// Two such blocks fill a processor of 2048 threads, at 32 registers a thread, and hold two rows of 100 KB: one's row is on its way
// while the other computes. Not tuned.
constexpr int MAX_BLOCK = 1024;

struct Statistics {
    float largest, total;  // the largest logit, and the sum of exp(logit - largest)
};

// All threads of the block must call it, and get the same. No thread writes to the row before the last has read it.
template <typename T, int SIZE>
Statistics row_statistics(const T* row, int vocab_size) {
    float largest = LOWEST, total = 0.0f;
    const int vectors = vocab_size / SIZE;
    Packed<T, SIZE> next;
    if ((int)threadIdx.x < vectors) next.load(row + threadIdx.x * SIZE);
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        const Packed<T, SIZE> v = next;
        if (i + (int)blockDim.x < vectors) next.load(row + (i + blockDim.x) * SIZE);  // on its way while this one is summed
        float larger = largest;
#pragma unroll
        for (int j = 0; j < SIZE; j++) larger = fmaxf(larger, v(j));
        total *= exponential(largest - larger);
        largest = larger;
#pragma unroll
        for (int j = 0; j < SIZE; j++) total += exponential(v(j) - largest);
    }
    // What is left of the vocabulary is less than a vector; a block is never smaller than that.
    const int last = vectors * SIZE + threadIdx.x;
    if (last < vocab_size) {
        const float x = to_float(row[last]), larger = fmaxf(largest, x);
        total = total * exponential(largest - larger) + exponential(x - larger);
        largest = larger;
    }
    const float row_largest = block_reduce(largest, Max(), LOWEST);
    return {row_largest, block_reduce(total * exponential(largest - row_largest), Sum(), 0.0f)};
}

template <typename T, int SIZE>
__global__ void __launch_bounds__(MAX_BLOCK)
    cross_entropy_forward(float* nll, bool* correct, const T* logits, const int* targets, int width, int vocab_size) {
    const T* row = logits + (long long)blockIdx.x * width;  // rows * width passes 2^31 at 42,690 rows of 50,304
    const Statistics s = row_statistics<T, SIZE>(row, vocab_size);
    if (threadIdx.x == 0) {
        const float target = to_float(row[targets[blockIdx.x]]);
        nll[blockIdx.x] = logf(s.total) + (s.largest - target);
        correct[blockIdx.x] = target == s.largest;
    }
}

// hold: whether the row is held in dynamic shared memory, of as many bytes.
template <typename T, int SIZE>
__global__ void __launch_bounds__(MAX_BLOCK)
    cross_entropy_backward(T* dlogits, float* nll, const int* targets, const float* weight, int width, int vocab_size, bool row_in_smem) {
    extern __shared__ uint4 shared[];
    T* const row = dlogits + (long long)blockIdx.x * width;
    const T* logits = row;
    if constexpr (SIZE * sizeof(T) == 16)
        if (row_in_smem) {
            T* const held = reinterpret_cast<T*>(shared);
            for (int i = threadIdx.x * SIZE; i < width; i += blockDim.x * SIZE) cp_async(shared_address(held + i), row + i, true);
            logits = held;
        }
    const int target = targets[blockIdx.x];
    // Read before the barriers in row_statistics, which separate it from the writes below.
    const float target_logit = to_float(row[target]), row_weight = weight[blockIdx.x];
    cp_async_wait_all();
    __syncthreads();  // a thread's copies, complete, are read below by others
    const Statistics s = row_statistics<T, SIZE>(logits, vocab_size);
    if (threadIdx.x == 0) nll[blockIdx.x] = logf(s.total) + (s.largest - target_logit);
    const float scale = row_weight / s.total;
    for (int i = width / SIZE - 1 - (int)threadIdx.x; i >= 0; i -= blockDim.x) {
        Packed<T, SIZE> v;
        v.load(logits + i * SIZE);
        const int inside = vocab_size - i * SIZE;  // of its elements, those that are no padding
        const int hit = target - i * SIZE;         // the element that is the target, if any
        const auto gradient = [&](int j) { return exponential(v(j) - s.largest) * scale; };
        if (inside >= SIZE && (hit < 0 || hit >= SIZE)) v.set(gradient);
        else v.set([&](int j) {
            const float d = gradient(j) - (j == hit ? row_weight : 0.0f);
            return j < inside ? d : 0.0f;
        });
        v.store(row + i * SIZE);
    }
}
