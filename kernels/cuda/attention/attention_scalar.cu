// Causal grouped-query attention in plain fp32 arithmetic: the text to learn it from, and the kernel for every
// head dim up to 128, in fp32 and bf16.
//
//     s[t, j] = q[t] . k[j] / sqrt(D)  for start[b, t] <= j <= t        lse[t] = log sum_j exp(s[t, j])
//     out[t]  = sum_j exp(s[t, j] - lse[t]) v[j]
//
// The scores of one query are never all in memory. Keys come in tiles; a query keeps the largest score so far m, the sum
// l = sum_j exp(s[j] - m) and o = sum_j exp(s[j] - m) v[j], and a tile that raises m scales l and o down by exp(m_old - m_new).
// In the end out = o / l and lse = m + log l.
//
// Backward, the probabilities computed again from lse, with delta[t] = dout[t] . out[t]:
//
//     p[t, j] = exp(s[t, j] - lse[t])        ds[t, j] = p[t, j] * (dout[t] . v[j] - delta[t]) / sqrt(D)
//     dq[t] = sum_j ds[t, j] k[j]            dk[j] = sum_t ds[t, j] q[t]            dv[j] = sum_t p[t, j] dout[t]
//
// dq sums over keys, dk and dv over queries: two kernels, each with its own sum's rows in its registers. That computes s and
// dout . v twice and needs no atomics.
//
// Layout: qkv and dqkv (B, T, H + 2 KV, D) of T: H query heads, then KV key heads, then KV value heads; query head h reads key
//         head h / (H / KV). out and dout (B, T, H, D) of T. lse and delta (B, H, T) fp32. start (B, T) int32, never falling
//         along a row. Row offsets are long long: B * T * (H + 2 KV) * D passes 2^31 at B = 128, T = 8192, 36 heads of 64.
// Work: a block owns TILE rows of one head (queries; or keys, and then all query heads that share them), a warp ROWS of them.
//       It walks over tiles of TILE rows of the other side. Scores: a lane owns one row of the other tile. Products with the
//       scores: a lane owns the features lane, lane + 32, ... HEAD_DIM is D rounded up to a warp; the features past D are zeros.
// Skipped: tiles wholly past the diagonal, or wholly in another document.
// Saved: lse. Precision: fp32, one rounding to T at each store. Determinism: every sum has a fixed order; no atomics.
// Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (running softmax); Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4.

#include "reduce.cuh"

constexpr int TILE = WARP;  // rows of the other side: a lane each
constexpr int WARPS = 4;
constexpr int ROWS = TILE / WARPS;
constexpr int QUAD = 4;  // floats of one 16-byte load

struct alignas(16) Quad {
    float x, y, z, w;
};

// A tile's row is padded by one Quad: 8 lanes that read a Quad each of 8 rows then touch all 32 banks, and no bank twice.
template <int HEAD_DIM>
constexpr int STRIDE = HEAD_DIM + QUAD;

inline float minus_infinity() { return __int_as_float(0xff800000); }

// tile[row, d] = source[row * step + d], zero from row `rows` and from feature `head_dim` on.
template <int HEAD_DIM, typename T>
void load_tile(float* tile, const T* source, long long step, int rows, int head_dim) {
    for (int i = threadIdx.x; i < TILE * HEAD_DIM; i += blockDim.x) {
        const int row = i / HEAD_DIM, d = i % HEAD_DIM;
        tile[row * STRIDE<HEAD_DIM> + d] = row < rows && d < head_dim ? to_float(source[row * step + d]) : 0.0f;
    }
}

// dot[r] = row r of the warp's ROWS times the lane's row of the other tile.
template <int HEAD_DIM>
void dot_rows(float (&dot)[ROWS], const float* own, const float* other) {
    const Quad* lane_row = reinterpret_cast<const Quad*>(other + threadIdx.x % WARP * STRIDE<HEAD_DIM>);
#pragma unroll
    for (int r = 0; r < ROWS; r++) dot[r] = 0.0f;
    for (int i = 0; i < HEAD_DIM / QUAD; i++) {
        const Quad b = lane_row[i];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const Quad a = reinterpret_cast<const Quad*>(own + r * STRIDE<HEAD_DIM>)[i];  // one address: a broadcast
            dot[r] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
    }
}

// sum[r][c] += sum over j of weight[r, j] * other[j, c * 32 + lane]; weight (ROWS, TILE) is the warp's own.
template <int HEAD_DIM>
void add_weighted(float (&sum)[ROWS][HEAD_DIM / WARP], const float* weight, const float* other) {
    const int lane = threadIdx.x % WARP;
    for (int j = 0; j < TILE; j += QUAD) {
        float value[QUAD][HEAD_DIM / WARP];
#pragma unroll
        for (int i = 0; i < QUAD; i++)
#pragma unroll
            for (int c = 0; c < HEAD_DIM / WARP; c++) value[i][c] = other[(j + i) * STRIDE<HEAD_DIM> + c * WARP + lane];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const Quad w = *reinterpret_cast<const Quad*>(weight + r * TILE + j);
#pragma unroll
            for (int c = 0; c < HEAD_DIM / WARP; c++)
                sum[r][c] += w.x * value[0][c] + w.y * value[1][c] + w.z * value[2][c] + w.w * value[3][c];
        }
    }
}

// row[d] = sum[d] * scale, of the warp's row r.
template <int HEAD_DIM, typename T>
void store_row(T* row, const float (&sum)[HEAD_DIM / WARP], float scale, int head_dim) {
#pragma unroll
    for (int c = 0; c < HEAD_DIM / WARP; c++) {
        const int d = c * WARP + threadIdx.x % WARP;
        if (d < head_dim) row[d] = from_float<T>(sum[c] * scale);
    }
}

// Grid (query tiles, H, B), the tiles with most keys first.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(WARPS * WARP) attention_forward(T* out, float* lse, const T* qkv, const int* start, int length,
                                                                  int heads, int kv_heads, int head_dim, float scale) {
    __shared__ alignas(16) float query[TILE * STRIDE<HEAD_DIM>], key_or_value[TILE * STRIDE<HEAD_DIM>];
    __shared__ alignas(16) float probability[TILE * TILE];
    const int first = (gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y, b = blockIdx.z, shared = head / (heads / kv_heads);
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * ROWS;  // the warp's first row of the tile
    const long long step = (long long)(heads + 2 * kv_heads) * head_dim, row = (long long)b * length;
    const T* keys = qkv + row * step + (long long)(heads + shared) * head_dim;
    const T* values = keys + (long long)kv_heads * head_dim;
    const int end = min(first + TILE, length);

    load_tile<HEAD_DIM>(query, qkv + (row + first) * step + (long long)head * head_dim, step, end - first, head_dim);
    float largest[ROWS], total[ROWS], mean[ROWS][HEAD_DIM / WARP] = {};
    int begin[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        largest[r] = minus_infinity();
        total[r] = 0.0f;
        begin[r] = start[row + min(first + own + r, length - 1)];
    }
    for (int tile = start[row + first]; tile < end; tile += TILE) {
        __syncthreads();  // the values of the tile before have been read
        load_tile<HEAD_DIM>(key_or_value, keys + tile * step, step, end - tile, head_dim);
        __syncthreads();  // the keys, and the queries at first, are there
        float score[ROWS];
        dot_rows<HEAD_DIM>(score, query + own * STRIDE<HEAD_DIM>, key_or_value);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int t = first + own + r, j = tile + lane;
            const float s = begin[r] <= j && j <= t ? score[r] * scale : minus_infinity();
            const float raised = fmaxf(largest[r], warp_reduce(s, Max()));
            // Until the first key that the query sees, raised is -inf, and -inf - -inf would be NaN.
            const float shift = raised == minus_infinity() ? 0.0f : raised;
            const float p = expf(s - shift), kept = expf(largest[r] - shift);
            total[r] = total[r] * kept + warp_reduce(p, Sum());
#pragma unroll
            for (int c = 0; c < HEAD_DIM / WARP; c++) mean[r][c] *= kept;
            largest[r] = raised;
            probability[(own + r) * TILE + lane] = p;
        }
        __syncthreads();  // the keys and, within each warp, the products with the weights before, are done with
        load_tile<HEAD_DIM>(key_or_value, values + tile * step, step, end - tile, head_dim);
        __syncthreads();  // the values and the probabilities are there
        add_weighted<HEAD_DIM>(mean, probability + own * TILE, key_or_value);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int t = first + own + r;
        if (t >= end) break;
        store_row<HEAD_DIM>(out + ((row + t) * heads + head) * head_dim, mean[r], 1.0f / total[r], head_dim);
        if (lane == 0) lse[((long long)b * heads + head) * length + t] = largest[r] + logf(total[r]);
    }
}

// delta[b, h, t] = dout[b, t, h] . out[b, t, h], both rounded to T. A row of (B T H) has LANES lanes.
template <typename T, int SIZE>
__global__ void attention_delta(float* delta, const T* dout, const T* out, long long rows, int length, int heads, int head_dim) {
    constexpr int LANES = 8;
    const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    float dot = 0.0f;
    if (row < rows) {
        for (int d = threadIdx.x % LANES * SIZE; d < head_dim; d += LANES * SIZE) {
            const auto a = *reinterpret_cast<const Vector<T, SIZE>*>(dout + row * head_dim + d);
            const auto b = *reinterpret_cast<const Vector<T, SIZE>*>(out + row * head_dim + d);
#pragma unroll
            for (int i = 0; i < SIZE; i++) dot += to_float(a.element[i]) * to_float(b.element[i]);
        }
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(ALL_LANES, dot, offset);  // no lane has left
    if (row >= rows || threadIdx.x % LANES) return;
    const long long head = row % heads, position = row / heads;
    delta[(position / length * heads + head) * length + position % length] = dot;
}

// Grid (query tiles, H, B), the tiles with most keys first.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(WARPS * WARP, HEAD_DIM <= 64 ? 3 : 2)
    attention_backward_query(T* dqkv, const float* delta, const T* dout, const float* lse, const T* qkv, const int* start,
                             int length, int heads, int kv_heads, int head_dim, float scale) {
    extern __shared__ __align__(16) float memory[];
    constexpr int SIZE = TILE * STRIDE<HEAD_DIM>;
    float *query = memory, *gradient = query + SIZE, *key = gradient + SIZE, *value = key + SIZE, *weight = value + SIZE;
    const int first = (gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y, b = blockIdx.z, shared = head / (heads / kv_heads);
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * ROWS;
    const long long step = (long long)(heads + 2 * kv_heads) * head_dim, row = (long long)b * length;
    const T* keys = qkv + row * step + (long long)(heads + shared) * head_dim;
    const T* values = keys + (long long)kv_heads * head_dim;
    const int end = min(first + TILE, length);
    const long long query_row = (row + first) * step + (long long)head * head_dim, gradient_step = (long long)heads * head_dim;

    load_tile<HEAD_DIM>(query, qkv + query_row, step, end - first, head_dim);
    load_tile<HEAD_DIM>(gradient, dout + (row + first) * gradient_step + head * head_dim, gradient_step, end - first, head_dim);
    float row_lse[ROWS], row_delta[ROWS], sum[ROWS][HEAD_DIM / WARP] = {};
    int begin[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int t = min(first + own + r, length - 1);
        const long long at = ((long long)b * heads + head) * length + t;
        row_lse[r] = lse[at];
        row_delta[r] = delta[at];
        begin[r] = start[row + t];
    }
    for (int tile = start[row + first]; tile < end; tile += TILE) {
        __syncthreads();  // the tile before has been read
        load_tile<HEAD_DIM>(key, keys + tile * step, step, end - tile, head_dim);
        load_tile<HEAD_DIM>(value, values + tile * step, step, end - tile, head_dim);
        __syncthreads();  // keys and values, and what was loaded before the loop, are there
        float score[ROWS], dp[ROWS];
        dot_rows<HEAD_DIM>(score, query + own * STRIDE<HEAD_DIM>, key);
        dot_rows<HEAD_DIM>(dp, gradient + own * STRIDE<HEAD_DIM>, value);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int t = first + own + r, j = tile + lane;
            const float p = begin[r] <= j && j <= t ? expf(score[r] * scale - row_lse[r]) : 0.0f;
            weight[(own + r) * TILE + lane] = p * (dp[r] - row_delta[r]);
        }
        __syncwarp();  // a warp reads the weights that its own lanes wrote
        add_weighted<HEAD_DIM>(sum, weight + own * TILE, key);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (first + own + r < end) store_row<HEAD_DIM>(dqkv + query_row + (own + r) * step, sum[r], scale, head_dim);
}

// Grid (key tiles, KV, B): the tiles that most queries see come first by themselves.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(WARPS * WARP, HEAD_DIM <= 64 ? 3 : 2)
    attention_backward_key(T* dqkv, const float* delta, const T* dout, const float* lse, const T* qkv, const int* start,
                           int length, int heads, int kv_heads, int head_dim, float scale) {
    extern __shared__ __align__(16) float memory[];
    constexpr int SIZE = TILE * STRIDE<HEAD_DIM>;
    float *key = memory, *value = key + SIZE, *query = value + SIZE, *gradient = query + SIZE, *weight = gradient + SIZE;
    const int first = blockIdx.x * TILE, shared = blockIdx.y, b = blockIdx.z, group = heads / kv_heads;
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * ROWS;
    const long long step = (long long)(heads + 2 * kv_heads) * head_dim, row = (long long)b * length;
    const int end = min(first + TILE, length);
    const long long key_row = (row + first) * step + (long long)(heads + shared) * head_dim;
    const long long value_row = key_row + (long long)kv_heads * head_dim;

    load_tile<HEAD_DIM>(key, qkv + key_row, step, end - first, head_dim);
    load_tile<HEAD_DIM>(value, qkv + value_row, step, end - first, head_dim);
    float dkey[ROWS][HEAD_DIM / WARP] = {}, dvalue[ROWS][HEAD_DIM / WARP] = {};
    for (int head = shared * group; head < (shared + 1) * group; head++) {
        const float *head_lse = lse + ((long long)b * heads + head) * length, *head_delta = delta + (head_lse - lse);
        // start never falls: once a tile's first query begins its document behind these keys, no later one sees them.
        for (int tile = first; tile < length && start[row + tile] < end; tile += TILE) {
            const T* queries = qkv + (row + tile) * step + (long long)head * head_dim;
            const T* gradients = dout + ((row + tile) * heads + head) * head_dim;
            __syncthreads();  // the tile before has been read
            load_tile<HEAD_DIM>(query, queries, step, length - tile, head_dim);
            load_tile<HEAD_DIM>(gradient, gradients, (long long)heads * head_dim, length - tile, head_dim);
            __syncthreads();  // queries and gradients, and at first keys and values, are there
            const int t = tile + lane, inside = min(t, length - 1), begin = start[row + inside];
            const float lane_lse = head_lse[inside], lane_delta = head_delta[inside];
            float p[ROWS], dp[ROWS];
            dot_rows<HEAD_DIM>(p, key + own * STRIDE<HEAD_DIM>, query);
            dot_rows<HEAD_DIM>(dp, value + own * STRIDE<HEAD_DIM>, gradient);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int j = first + own + r;
                p[r] = t < length && begin <= j && j <= t ? expf(p[r] * scale - lane_lse) : 0.0f;
                weight[(own + r) * TILE + lane] = p[r];
            }
            __syncwarp();  // a warp reads the weights that its own lanes wrote
            add_weighted<HEAD_DIM>(dvalue, weight + own * TILE, gradient);
            __syncwarp();  // and has read p before ds takes its place
#pragma unroll
            for (int r = 0; r < ROWS; r++) weight[(own + r) * TILE + lane] = p[r] * (dp[r] - lane_delta);
            __syncwarp();  // as above
            add_weighted<HEAD_DIM>(dkey, weight + own * TILE, query);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (first + own + r >= end) break;
        store_row<HEAD_DIM>(dqkv + key_row + (own + r) * step, dkey[r], scale, head_dim);
        store_row<HEAD_DIM>(dqkv + value_row + (own + r) * step, dvalue[r], 1.0f, head_dim);
    }
}
