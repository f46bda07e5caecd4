// QK-norm: RMSNorm of each query and key head, fused with the rotation (RoPE) that follows it, in place.
//
//     rstd = 1 / sqrt(mean(x^2) + eps)        y = x * rstd * weight        qkv = rope(y)
//
// Backward recovers xhat = rope^-1(qkv) / weight (0 where the weight is 0). With dy = rope^-1(dqkv) and
// g = dy * weight:
//
//     dx       = rstd * (g - xhat * mean(g * xhat)),    g . xhat = dqkv . qkv, as rotations keep products
//     dweight += sum over rows and heads of dy * xhat
//
// Layout: qkv, dqkv (rows, heads, D) of T, rows = B * length. The first `normed` heads are changed: `queries`
//         query heads, then the key heads. rstd (rows, normed), weights (D,) fp32 or null. table as in
//         rope.cu, or null: no rotation.
// Team: `lanes` neighbouring lanes, a power of two, own up to HEADS heads of a row, `groups` apart.
// Lane: VECTORS pairs of vectors of a head: SIZE elements at i, and at i + D / 2, their partners in RoPE.
// Grid: forward and backward stride over (row, group). Backward keeps sums for dweight in registers, and
//       stores one row of each per block to `partial`. sum_rows.cu adds these rows to the gradients.
// Precision: fp32 arithmetic, one rounding to T at the store.
// Determinism: every sum has a fixed order; no atomics.
// Source: Henry et al. 2020, arXiv:2010.04245; with RMSNorm, Dehghani et al. 2023, arXiv:2302.05442.

#include "vectors.cuh"

// The sizes that both directions share. count: (row, group) items, rows * groups; count * lanes
// is below 2^31. width: half a row of table.
struct Sizes {
    int count, length, heads, queries, normed, head_dim, width, groups, lanes;
};

// A lane's elements of one head, as fp32. Elements past the end are zero.
template <int SIZE, int VECTORS>
struct Pairs {
    float a[VECTORS][SIZE], b[VECTORS][SIZE];

    // First column of the v-th vector of `a`; that of `b` is D / 2 further.
    static int column(int v, int lanes) { return (threadIdx.x % lanes + v * lanes) * SIZE; }

    template <typename T>
    void load(const T* head, int half, int lanes) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            Packed<T, SIZE> first, second;
            first.clear(), second.clear();
            const int i = column(v, lanes);
            if (i < half) first.load(head + i), second.load(head + half + i);
#pragma unroll
            for (int j = 0; j < SIZE; j++) a[v][j] = first(j), b[v][j] = second(j);
        }
    }

    template <typename T>
    void store(T* head, int half, int lanes) const {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            Packed<T, SIZE> first, second;
            first.set([&](int j) { return a[v][j]; });
            second.set([&](int j) { return b[v][j]; });
            const int i = column(v, lanes);
            if (i < half) first.store(head + i), second.store(head + half + i);
        }
    }

    void fill(float value) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) a[v][j] = b[v][j] = value;
    }

    // Apply f(a, other.a) and f(b, other.b) to each element.
    template <typename F>
    void update(const Pairs& other, F f) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) f(a[v][j], other.a[v][j]), f(b[v][j], other.b[v][j]);
    }

    // Rotate by the angles, where `angles` holds cosines in a and sines in b. direction: -1 rotates back.
    void rotate(const Pairs& angles, float direction) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                const float cosine = angles.a[v][j], sine = direction * angles.b[v][j], x = a[v][j];
                a[v][j] = x * cosine - b[v][j] * sine;
                b[v][j] = x * sine + b[v][j] * cosine;
            }
    }

    // Sum over the team of this . other. All lanes of the warp must call it.
    float dot(const Pairs& other, int lanes) const {
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) sum += a[v][j] * other.a[v][j] + b[v][j] * other.b[v][j];
        for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
        return sum;
    }

    // Cosines and sines of a row's position.
    void load_angles(const float* table, int position, int width, int half, int lanes) {
        fill(0.0f);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const float* const angles = table + (long long)position * 2 * width + column(v, lanes);
            if (column(v, lanes) < half) load_floats(a[v], angles), load_floats(b[v], angles + width);
        }
    }
};

// The item of the calling team in the block's `turn`-th step over the grid; beyond the last item, the last.
inline int team_item(const Sizes& s, int turn, bool& valid) {
    const int item = ((turn * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x) / s.lanes;
    valid = item < s.count;
    return min(item, s.count - 1);
}

// Steps over the grid that every block takes, so that all lanes of a warp meet at each shuffle.
inline int grid_turns(const Sizes& s) {
    const int items = gridDim.x * (blockDim.x / s.lanes);
    return (s.count + items - 1) / items;
}

template <typename T, int SIZE, int VECTORS, int HEADS>
__global__ void __launch_bounds__(256)
    qk_norm_forward(T* qkv, float* rstd, const int* start, const float* table, const float* query_weight,
                    const float* key_weight, int count, int length, int heads, int queries, int normed,
                    int head_dim, int width, int groups, int lanes, float eps) {
    using Head = Pairs<SIZE, VECTORS>;
    const Sizes s = {count, length, heads, queries, normed, head_dim, width, groups, lanes};
    const int half = s.head_dim / 2;
    for (int turn = 0; turn < grid_turns(s); turn++) {
        bool valid;
        const int item = team_item(s, turn, valid), row = item / s.groups, group = item % s.groups;
        T* const row_heads = qkv + (long long)row * s.heads * s.head_dim;
        Head x[HEADS], angles;
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            x[h].load(row_heads + min(group + h * s.groups, s.normed - 1) * s.head_dim, half, s.lanes);
        if (table) angles.load_angles(table, row % s.length - start[row], s.width, half, s.lanes);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const int head = group + h * s.groups;
            const float head_rstd = rsqrtf(x[h].dot(x[h], s.lanes) / s.head_dim + eps);
            if (!valid || head >= s.normed) continue;
            if (threadIdx.x % s.lanes == 0) rstd[(long long)row * s.normed + head] = head_rstd;
            Head weight;
            weight.fill(1.0f);
            if (query_weight) weight.load(head < s.queries ? query_weight : key_weight, half, s.lanes);
            x[h].update(weight, [&](float& y, float w) { y = y * head_rstd * w; });
            if (table) x[h].rotate(angles, 1.0f);
            x[h].store(row_heads + head * s.head_dim, half, s.lanes);
        }
    }
}

// partial (2, gridDim.x, D): the sums for the weights of queries and keys; null without weights.
template <typename T, int SIZE, int VECTORS, int HEADS, bool WEIGHTED>
__global__ void __launch_bounds__(256)
    qk_norm_backward(T* dqkv, float* partial, const T* qkv, const float* rstd, const int* start,
                     const float* table, const float* query_weight, const float* key_weight, int count,
                     int length, int heads, int queries, int normed, int head_dim, int width, int groups,
                     int lanes) {
    using Head = Pairs<SIZE, VECTORS>;
    const Sizes s = {count, length, heads, queries, normed, head_dim, width, groups, lanes};
    extern __shared__ float warp_partials[];  // (warps, 2, D)
    const int half = s.head_dim / 2;
    Head dweight[2];  // of queries and keys
    if constexpr (WEIGHTED) dweight[0].fill(0.0f), dweight[1].fill(0.0f);
    for (int turn = 0; turn < grid_turns(s); turn++) {
        bool valid;
        const int item = team_item(s, turn, valid), row = item / s.groups, group = item % s.groups;
        const long long first = (long long)row * s.heads * s.head_dim;
        Head d[HEADS], y[HEADS], angles;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const long long offset = first + min(group + h * s.groups, s.normed - 1) * s.head_dim;
            d[h].load(dqkv + offset, half, s.lanes), y[h].load(qkv + offset, half, s.lanes);
        }
        if (table) angles.load_angles(table, row % s.length - start[row], s.width, half, s.lanes);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const int head = group + h * s.groups;
            const float mean = d[h].dot(y[h], s.lanes) / s.head_dim;
            if (!valid || head >= s.normed) continue;
            const float head_rstd = rstd[(long long)row * s.normed + head];
            if (table) d[h].rotate(angles, -1.0f), y[h].rotate(angles, -1.0f);
            if constexpr (WEIGHTED) {
                Head weight;
                weight.load(head < s.queries ? query_weight : key_weight, half, s.lanes);
                y[h].update(weight, [](float& x, float w) { x = w == 0.0f ? 0.0f : x / w; });
                Head product = d[h];
                product.update(y[h], [](float& x, float xhat) { x *= xhat; });
                // A constant index keeps both sums in registers.
                if (head < s.queries) dweight[0].update(product, [](float& sum, float x) { sum += x; });
                else dweight[1].update(product, [](float& sum, float x) { sum += x; });
                d[h].update(weight, [](float& g, float w) { g *= w; });
            }
            d[h].update(y[h], [&](float& g, float xhat) { g = head_rstd * (g - xhat * mean); });
            d[h].store(dqkv + first + head * s.head_dim, half, s.lanes);
        }
    }
    if constexpr (!WEIGHTED) return;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        // Teams of a warp hold the same columns: their sums meet in the first team.
        for (int offset = s.lanes; offset < WARP; offset *= 2) {
            Head other = dweight[k];
            other.update(other, [&](float& x, float) { x = __shfl_xor_sync(ALL_LANES, x, offset); });
            dweight[k].update(other, [](float& sum, float x) { sum += x; });
        }
        float* const sums = warp_partials + (warp * 2 + k) * s.head_dim;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                const int i = Head::column(v, s.lanes) + j;
                if (lane >= s.lanes || i >= half) continue;
                sums[i] = dweight[k].a[v][j], sums[half + i] = dweight[k].b[v][j];
            }
    }
    __syncthreads();  // RAW: every thread reads the per-warp sums written above
    for (int i = threadIdx.x; i < 2 * s.head_dim; i += blockDim.x) {
        float sum = 0.0f;
        for (int w = 0; w < blockDim.x / WARP; w++) sum += warp_partials[w * 2 * s.head_dim + i];
        partial[(i / s.head_dim * (long long)gridDim.x + blockIdx.x) * s.head_dim + i % s.head_dim] = sum;
    }
}
