// Drawing the next token of each row.
//
//     greedy:  out = the id of the largest logit; the smallest id among equals
//     draw:    1. rank the candidates by logit, equal logits by rising id
//              2. top_k: keep the first top_k candidates (0: all)
//              3. top_p: of those, keep the shortest prefix with a fraction >= top_p of their probability
//              4. out = argmax over the kept candidates of z / temperature - log(-log(u))    (Gumbel-max)
//                 z = softcap * tanh(logit / softcap), or the logit with softcap 0
//                 u in (0, 1) is a hash of the row's `uniform` and the id
//
// A token is a candidate unless its logit is -infinity or NaN. A row without candidates gives 0.
//
// Layout: logits of T (rows, width); columns from vocab_size on are ignored.
//         uniform fp64 and out int32, both (rows,).
// Work: a block owns a row. Both cuts are a threshold in the ranking: the first candidate at which a running
//       sum reaches a target. top_k sums ones, top_p sums probabilities.
//       Each candidate has a 64-bit code in ranking order. find_cutoff is a radix select. It decides the
//       threshold's code bit by bit, with one sum over the row per bit. When at most BLOCK candidates are
//       left, the block sorts them and scans their running sum.
// Precision: fp64 for probabilities, their sums and the Gumbel noise.
// Determinism: sums have a fixed order. The one atomic counter assigns slots in an array that is sorted next.
// Source: Holtzman et al. 2020, arXiv:1904.09751 (top-p); Maddison, Tarlow and Minka 2014, arXiv:1411.0030,
//         section 2 (Gumbel-max); Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195 (the hash).

#include "dependent_launch.cuh"
#include "vectors.cuh"

using Code = unsigned long long;

constexpr int BLOCK = 1024;
constexpr unsigned SIGN = 0x80000000u;
constexpr Code NO_CODE = 0;
constexpr float LOWEST = -3.402823466e38f;  // the lowest finite float; -infinity and NaN fail x >= LOWEST

struct Larger {
    template <typename V>
    V operator()(V a, V b) const { return a > b ? a : b; }
};
struct Smaller {
    int operator()(int a, int b) const { return min(a, b); }
};

// The first candidate of the ranking has the largest code. Upper 32 bits: the logit, as an integer of the
// same order. Lower 32 bits: the complement of the id. -0 and 0 have equal codes.
inline Code code_of(float x, int id) {
    const unsigned bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    return (Code)(bits & SIGN ? ~bits : bits | SIGN) << 32 | ~(unsigned)id;
}
inline int id_of(Code code) { return (int)~(unsigned)code; }
inline float logit_of(Code code) {
    const unsigned key = (unsigned)(code >> 32);
    return __uint_as_float(key & SIGN ? key ^ SIGN : ~key);
}

// Calls visit(logit, id) for each candidate in the thread's vectors of the row. Tokens at -infinity are left
// out: their probability is 0, and no rounding may draw them.
template <typename T, int SIZE, typename Visit>
void for_each_candidate(const T* row, int vocab_size, Visit visit) {
    for (int i = threadIdx.x; i * SIZE < vocab_size; i += BLOCK) {
        // In bounds: padding fills the last vector.
        const auto v = reinterpret_cast<const Vector<T, SIZE>*>(row)[i];
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            const float x = to_float(v.element[j]);
            if (i * SIZE + j < vocab_size && x >= LOWEST) visit(x, i * SIZE + j);
        }
    }
}

// The largest code of the row, or NO_CODE without a candidate. All threads of the block must call it; all get
// the result. A thread first finds the earliest of its vectors that holds its maximum. Only that vector's
// elements become codes.
template <typename T, int SIZE>
Code best_code(const T* row, int vocab_size) {
    // Vectors that a thread loads before it compares them. Eight cover a row of 65,536 bf16. Not tuned.
    constexpr int LOADS_IN_FLIGHT = 8;
    const int full = vocab_size / SIZE;
    float best = __int_as_float(0xff800000);  // -infinity; fmaxf and > ignore NaN
    int best_vector = -1;
    for (int first = threadIdx.x; first < full; first += LOADS_IN_FLIGHT * BLOCK) {
        Packed<T, SIZE> v[LOADS_IN_FLIGHT];
#pragma unroll
        for (int a = 0; a < LOADS_IN_FLIGHT; a++)
            if (first + a * BLOCK < full) v[a].load(row + (first + a * BLOCK) * SIZE);
#pragma unroll
        for (int a = 0; a < LOADS_IN_FLIGHT; a++) {
            if (first + a * BLOCK >= full) break;
            float largest = v[a](0);
#pragma unroll
            for (int j = 1; j < SIZE; j++) largest = fmaxf(largest, v[a](j));
            if (largest > best) best = largest, best_vector = first + a * BLOCK;
        }
    }
    Code code = NO_CODE;
    const auto include = [&](int id) {
        const float x = to_float(row[id]);
        if (x >= LOWEST) code = max(code, code_of(x, id));
    };
    for (int j = 0; best_vector >= 0 && j < SIZE; j++) include(best_vector * SIZE + j);
    for (int id = full * SIZE + threadIdx.x; id < vocab_size; id += BLOCK) include(id);  // the tail
    return block_reduce(code, Larger(), NO_CODE);
}

// Measures: what a candidate adds to a running sum.
struct CountOne {
    double operator()(float) const { return 1.0; }
};
// z of a logit. tanh by exp, which is in the kernel anyway: with tanh() it would spill.
template <bool CAPPED>
double capped(double x, double softcap) {
    return CAPPED ? softcap - 2 * softcap / (1 + exp(2 / softcap * x)) : x;
}
template <bool CAPPED>
struct Probability {  // unnormalised
    double largest_z, softcap, inverse_temperature;
    double operator()(float x) const {
        return exp((capped<CAPPED>(x, softcap) - largest_z) * inverse_temperature);
    }
};

struct Total {
    double sum;
    int count;
};

// The sum of `measure` and the number of candidates with codes in [first, last]. All threads of the block
// must call it; all get the result.
template <typename T, int SIZE, typename Measure>
Total total_between(const T* row, int vocab_size, Code first, Code last, Measure measure) {
    double sum = 0.0;
    int count = 0;
    for_each_candidate<T, SIZE>(row, vocab_size, [&](float x, int id) {
        const Code code = code_of(x, id);
        if (code >= first && code <= last) {
            sum += measure(x);
            count++;
        }
    });
    return {block_reduce(sum, Sum(), 0.0), block_reduce(count, Sum(), 0)};
}

// Sorts BLOCK codes, the largest first: a bitonic network, one element per thread and step.
inline void sort_descending(Code* codes) {
    for (int size = 2; size <= BLOCK; size *= 2) {
        for (int stride = size / 2; stride > 0; stride /= 2) {
            __syncthreads();  // separates earlier writes of codes, by the caller or a step, from these reads
            const int low = threadIdx.x, high = low ^ stride;
            if (high > low) {
                const Code a = codes[low], b = codes[high];
                if ((a < b) == ((low & size) == 0)) {
                    codes[low] = b;
                    codes[high] = a;
                }
            }
        }
    }
    __syncthreads();  // separates the last step's writes from the caller's reads
}

// The inclusive prefix sum over the block's threads. All threads must call it.
inline double block_scan(double value) {
    __shared__ double warp_partials[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    double sum = value;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const double before = __shfl_up_sync(ALL_LANES, sum, offset);
        if (lane >= offset) sum += before;
    }
    __syncthreads();  // separates these writes from the reads of an earlier call
    if (lane == WARP - 1) warp_partials[warp] = sum;
    __syncthreads();  // separates the writes of warp_partials from all threads' reads
    double before = 0.0;
    for (int i = 0; i < warp; i++) before += warp_partials[i];
    return before + sum;
}

// The code of the first candidate of the ranking at which the running sum of `measure` reaches `target`. If
// rounding lets none reach it: the last candidate. Only the `count` candidates with codes >= `lowest` take
// part; count is at least 1. All threads of the block must call it; all get the result.
template <typename T, int SIZE, typename Measure>
Code find_cutoff(const T* row, int vocab_size, Code lowest, int count, double target, Measure measure) {
    __shared__ Code codes[BLOCK];
    __shared__ int slots;
    // Loop invariant: the threshold lies in [first, first + 2^(bit + 1)), with `count` >= 1 candidates in it.
    // `above` is the sum of the measures of all larger codes.
    Code first = 0;
    double above = 0.0;
    int bit = 63;
    for (; count > BLOCK; bit--) {
        const Code half = Code(1) << bit, middle = first + half;
        const Code top = middle + (half - 1);
        const Total upper = total_between<T, SIZE>(row, vocab_size, max(middle, lowest), top, measure);
        const double sum = above + upper.sum;
        if (upper.count == count || sum >= target) {
            first = middle;
            count = upper.count;
        } else {
            above = sum;
            count -= upper.count;
        }
    }
    const Code last = first + ((Code(2) << bit) - 1);  // all ones if the loop did not run
    first = max(first, lowest);
    __syncthreads();  // separates an earlier call's reads of the shared arrays from these writes
    codes[threadIdx.x] = NO_CODE;  // sorts behind every candidate
    if (threadIdx.x == 0) slots = 0;
    __syncthreads();  // separates the initialisation from the atomics and the writes of codes
    for_each_candidate<T, SIZE>(row, vocab_size, [&](float x, int id) {
        const Code code = code_of(x, id);
        if (code >= first && code <= last) codes[atomicAdd(&slots, 1)] = code;
    });
    sort_descending(codes);
    const bool has_code = (int)threadIdx.x < count;
    const double sum = above + block_scan(has_code ? measure(logit_of(codes[threadIdx.x])) : 0.0);
    // The running sums do not fall from thread to thread: this is the number of codes before the cutoff.
    const int before = __syncthreads_count(has_code && sum < target);
    return codes[min(before, count - 1)];
}

// Gumbel noise for a token: a hash of the row's uniform number and the id, whatever the logits.
inline double gumbel(double uniform, int id) {
    Code z = (Code)__double_as_longlong(uniform) + 0x9E3779B97F4A7C15ull * (id + 1ull);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return -log(-log(((double)(z >> 12) + 0.5) * 0x1p-52));
}

template <typename T, int SIZE>
__global__ void __launch_bounds__(BLOCK) sample_greedy(int* out, const T* logits, int width, int vocab_size) {
    grid_dependency_wait();
    const Code best = best_code<T, SIZE>(logits + (long long)blockIdx.x * width, vocab_size);
    if (threadIdx.x == 0) out[blockIdx.x] = best == NO_CODE ? 0 : id_of(best);
}

template <typename T, int SIZE, bool CAPPED>
__global__ void __launch_bounds__(BLOCK)
    sample_draw(int* out, const T* logits, const double* uniform, int width, int vocab_size,
                double softcap, double inverse_temperature, int top_k, double top_p) {
    const double row_uniform = uniform[blockIdx.x];  // may lie in host memory: loads during the wait
    grid_dependency_wait();
    const T* row = logits + (long long)blockIdx.x * width;
    constexpr Code MAX_CODE = ~NO_CODE;
    constexpr double MINUS_INFINITY = -1.0 / 0.0;
    constexpr int NO_ID = 0x7FFFFFFF;  // larger than every id
    Code lowest = NO_CODE;  // candidates with smaller codes are cut off
    if (top_k > 0 && top_k < vocab_size) {
        const int candidates = total_between<T, SIZE>(row, vocab_size, lowest, MAX_CODE, CountOne()).count;
        if (top_k < candidates)
            lowest = find_cutoff<T, SIZE>(row, vocab_size, lowest, candidates, top_k, CountOne());
    }
    if (top_p < 1.0) {
        const Code best = best_code<T, SIZE>(row, vocab_size);
        const double largest_z = capped<CAPPED>(logit_of(best), softcap);
        const Probability<CAPPED> probability = {largest_z, softcap, inverse_temperature};
        const Total kept = total_between<T, SIZE>(row, vocab_size, lowest, MAX_CODE, probability);
        if (kept.count)
            lowest = find_cutoff<T, SIZE>(row, vocab_size, lowest, kept.count, top_p * kept.sum, probability);
    }
    double best_score = MINUS_INFINITY;
    int best_id = NO_ID;
    for_each_candidate<T, SIZE>(row, vocab_size, [&](float x, int id) {
        if (code_of(x, id) < lowest) return;
        const double score = capped<CAPPED>(x, softcap) * inverse_temperature + gumbel(row_uniform, id);
        if (score > best_score) best_score = score, best_id = id;
    });
    const double largest = block_reduce(best_score, Larger(), MINUS_INFINITY);
    const int drawn = block_reduce(best_score == largest ? best_id : NO_ID, Smaller(), NO_ID);
    if (threadIdx.x == 0) out[blockIdx.x] = drawn == NO_ID ? 0 : drawn;
}
