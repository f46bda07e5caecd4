// Drawing the next token.
//
//     greedy:  out = the id of the largest logit, the smallest id among equals
//     draw:    candidates are ranked by logit, the smaller id first among equals; the first top_k of them stay (0: all), then the
//              shortest prefix that has the share top_p of their probability; of those that stay,
//              out = argmax(logit / temperature - log(-log(u))), u in (0, 1) a hash of the row's `uniform` and the id
//
// Layout: logits of T (rows, width), of which columns from vocab_size on take no part; uniform fp64 and out int32 (rows,).
// Work: a block owns a row. Nothing is sorted but a handful: each of the two cuts is a place in the ranking at which a running
//       sum (of ones, or of probabilities) reaches a target. An element's rank is one integer, its code; the place is found
//       bit by bit from the top, each by one sum over the row, until a block can sort the few codes that are left in question.
//       A row without a candidate (each logit -infinity or NaN) gives 0.
// Precision: probabilities, their sums, and what is added to logits in fp64.
// Determinism: sums have a fixed order; the atomic counter only hands out places in an array that is sorted next.
// Source: Holtzman et al. 2020, arXiv:1904.09751 (top-p); Maddison, Tarlow and Minka 2014, arXiv:1411.0030, section 2 (the draw);
//         Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195 (the hash).

#include "dependent_launch.cuh"
#include "vectors.cuh"

using Code = unsigned long long;

constexpr int BLOCK = 1024;
constexpr unsigned SIGN = 0x80000000u;
constexpr Code NO_CODE = 0;
constexpr float LOWEST = -3.402823466e38f;  // the least number; -infinity and NaN do not reach it

struct Larger {
    template <typename V>
    V operator()(V a, V b) const { return a > b ? a : b; }
};
struct Smaller {
    int operator()(int a, int b) const { return min(a, b); }
};

// Codes are ordered as the ranking is, the first the largest: the logit above, as an integer of the same order; below it the id,
// complemented. -0 equals 0.
inline Code code_of(float x, int id) {
    const unsigned bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    return (Code)(bits & SIGN ? ~bits : bits | SIGN) << 32 | ~(unsigned)id;
}
inline int id_of(Code code) { return (int)~(unsigned)code; }
inline float logit_of(Code code) {
    const unsigned key = (unsigned)(code >> 32);
    return __uint_as_float(key & SIGN ? key ^ SIGN : ~key);
}

// visit(logit, id) for the thread's part of the row. A token whose logit is -infinity is no candidate: its probability is 0, and
// no rounding may draw it.
template <typename T, int SIZE, typename Visit>
void over_row(const T* row, int vocab_size, Visit visit) {
    for (int i = threadIdx.x; i * SIZE < vocab_size; i += BLOCK) {
        const auto v = reinterpret_cast<const Vector<T, SIZE>*>(row)[i];  // padding fills the last vector
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            const float x = to_float(v.element[j]);
            if (i * SIZE + j < vocab_size && x >= LOWEST) visit(x, i * SIZE + j);
        }
    }
}

// The code of the likeliest, NO_CODE where there is no candidate.
template <typename T, int SIZE>
Code first_of(const T* row, int vocab_size) {
    constexpr int AHEAD = 8;  // vectors under way: a row of 65,536 bf16 in one go
    const int full = vocab_size / SIZE;
    float best = __int_as_float(0xff800000);  // -infinity; no NaN changes a maximum
    int place = -1;  // the first vector that has it
    for (int first = threadIdx.x; first < full; first += AHEAD * BLOCK) {
        Packed<T, SIZE> v[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (first + a * BLOCK < full) v[a].load(row + (first + a * BLOCK) * SIZE);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (first + a * BLOCK >= full) break;
            float largest = v[a](0);
#pragma unroll
            for (int j = 1; j < SIZE; j++) largest = fmaxf(largest, v[a](j));
            if (largest > best) best = largest, place = first + a * BLOCK;
        }
    }
    Code code = NO_CODE;
    const auto take = [&](int id) {
        const float x = to_float(row[id]);
        if (x >= LOWEST) code = max(code, code_of(x, id));
    };
    for (int j = 0; place >= 0 && j < SIZE; j++) take(place * SIZE + j);
    for (int id = full * SIZE + threadIdx.x; id < vocab_size; id += BLOCK) take(id);
    return block_reduce(code, Larger(), NO_CODE);
}

// What an element adds to a running sum.
struct One {
    double operator()(float) const { return 1.0; }
};
struct Probability {  // up to a factor
    double largest, inverse_temperature;
    double operator()(float x) const { return exp(((double)x - largest) * inverse_temperature); }
};

struct Total {
    double sum;
    int count;
};

// Over the codes from first to last, both included. All threads of the block must call it, and get the same.
template <typename T, int SIZE, typename Measure>
Total total_between(const T* row, int vocab_size, Code first, Code last, Measure measure) {
    double sum = 0.0;
    int count = 0;
    over_row<T, SIZE>(row, vocab_size, [&](float x, int id) {
        const Code code = code_of(x, id);
        if (code >= first && code <= last) {
            sum += measure(x);
            count++;
        }
    });
    return {block_reduce(sum, Sum(), 0.0), block_reduce(count, Sum(), 0)};
}

// Thread t's is the t-th largest of the block's codes: a bitonic network, a code a thread.
inline void sort_descending(Code* codes) {
    for (int size = 2; size <= BLOCK; size *= 2) {
        for (int stride = size / 2; stride > 0; stride /= 2) {
            __syncthreads();  // the codes' writes, before or in the last round, are done
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
    __syncthreads();  // the last round's writes are read by all
}

// The sum over threads 0 to this one.
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
    __syncthreads();  // the warps' sums, written above, are read below
    double before = 0.0;
    for (int i = 0; i < warp; i++) before += warp_partials[i];
    return before + sum;
}

// The code of the first element, in the order of the ranking, at which the running sum of `measure` reaches `target`; the last
// element where rounding lets none. Only the `count` codes from `lowest` on take part, at least one.
template <typename T, int SIZE, typename Measure>
Code find(const T* row, int vocab_size, Code lowest, int count, double target, Measure measure) {
    __shared__ Code codes[BLOCK];
    __shared__ int places;
    // In question are codes of [first, first + 2^(bit + 1)): `count` elements, at least one; `above` is the sum beyond them.
    Code first = 0;
    double above = 0.0;
    int bit = 63;
    for (; count > BLOCK; bit--) {
        const Code half = Code(1) << bit, middle = first + half;
        const Total upper = total_between<T, SIZE>(row, vocab_size, max(middle, lowest), middle + (half - 1), measure);
        const double sum = above + upper.sum;
        if (upper.count == count || sum >= target) {
            first = middle;
            count = upper.count;
        } else {
            above = sum;
            count -= upper.count;
        }
    }
    const Code last = first + ((Code(2) << bit) - 1);  // all ones where no bit was decided
    first = max(first, lowest);
    __syncthreads();  // an earlier call's reads of the shared arrays are done
    codes[threadIdx.x] = NO_CODE;  // ranks behind every element
    if (threadIdx.x == 0) places = 0;
    __syncthreads();  // both are set before any place is taken
    over_row<T, SIZE>(row, vocab_size, [&](float x, int id) {
        const Code code = code_of(x, id);
        if (code >= first && code <= last) codes[atomicAdd(&places, 1)] = code;
    });
    sort_descending(codes);
    const bool taken = (int)threadIdx.x < count;
    const double sum = above + block_scan(taken ? measure(logit_of(codes[threadIdx.x])) : 0.0);
    const int before = __syncthreads_count(taken && sum < target);
    return codes[min(before, count - 1)];
}

// What is added to the logit of a token: its distribution is Gumbel's, and for one number the same whatever the logits.
inline double gumbel(double number, int id) {
    Code z = (Code)__double_as_longlong(number) + 0x9E3779B97F4A7C15ull * (id + 1ull);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return -log(-log(((double)(z >> 12) + 0.5) * 0x1p-52));
}

template <typename T, int SIZE>
__global__ void __launch_bounds__(BLOCK) sample_greedy(int* out, const T* logits, int width, int vocab_size) {
    grid_dependency_wait();
    const Code best = first_of<T, SIZE>(logits + (long long)blockIdx.x * width, vocab_size);
    if (threadIdx.x == 0) out[blockIdx.x] = best == NO_CODE ? 0 : id_of(best);
}

template <typename T, int SIZE>
__global__ void __launch_bounds__(BLOCK)
    sample_draw(int* out, const T* logits, const double* uniform, int width, int vocab_size, double inverse_temperature,
                  int top_k, double top_p) {
    const double number = uniform[blockIdx.x];  // may lie in the host's memory: on its way meanwhile
    grid_dependency_wait();
    const T* row = logits + (long long)blockIdx.x * width;
    constexpr Code FIRST_OF_ALL = ~NO_CODE;
    constexpr double MINUS_INFINITY = -1.0 / 0.0;
    constexpr int NOWHERE = 0x7FFFFFFF;  // behind every id
    Code lowest = NO_CODE;
    if (top_k > 0 && top_k < vocab_size) {
        const int candidates = total_between<T, SIZE>(row, vocab_size, lowest, FIRST_OF_ALL, One()).count;
        if (top_k < candidates) lowest = find<T, SIZE>(row, vocab_size, lowest, candidates, top_k, One());
    }
    if (top_p < 1.0) {
        const Code best = first_of<T, SIZE>(row, vocab_size);
        const Probability probability = {logit_of(best), inverse_temperature};
        const Total kept = total_between<T, SIZE>(row, vocab_size, lowest, FIRST_OF_ALL, probability);
        if (kept.count) lowest = find<T, SIZE>(row, vocab_size, lowest, kept.count, top_p * kept.sum, probability);
    }
    double most = MINUS_INFINITY;
    int place = NOWHERE;
    over_row<T, SIZE>(row, vocab_size, [&](float x, int id) {
        if (code_of(x, id) < lowest) return;
        const double score = x * inverse_temperature + gumbel(number, id);
        if (score > most) most = score, place = id;
    });
    const double largest = block_reduce(most, Larger(), MINUS_INFINITY);
    const int drawn = block_reduce(most == largest ? place : NOWHERE, Smaller(), NOWHERE);
    if (threadIdx.x == 0) out[blockIdx.x] = drawn == NOWHERE ? 0 : drawn;
}
