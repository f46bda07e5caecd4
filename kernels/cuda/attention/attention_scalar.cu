// Causal grouped-query attention in plain fp32 arithmetic: the kernel
// to read first. It takes every head dim up to 128, in fp32 and bf16.
//
//     s[t, j] = q[t] . k[j] / sqrt(D)  for start[b, t] <= j <= t        lse[t] = log sum_j exp(s[t, j])
//     p[t, j] = exp(s[t, j] - lse[t])                                   out[t] = sum_j p[t, j] v[j]
//     delta[t] = dout[t] . out[t]        ds[t, j] = p[t, j] * (dout[t] . v[j] - delta[t]) / sqrt(D)
//     dq[t] = sum_j ds[t, j] k[j]        dk[j] = sum_t ds[t, j] q[t]        dv[j] = sum_t p[t, j] dout[t]
//
// Forward: online softmax over key tiles. A row keeps its running maximum m, l = sum_j exp(s[j] - m) and
//     o = sum_j exp(s[j] - m) v[j]. If m grows, l and o are scaled by exp(m_old - m_new). At the end
//     out = o / l and lse = m + log l.
// Backward: p is recomputed from lse. One kernel sums dq over keys, another dk and dv over queries.
// Layout: qkv and dqkv (B, T, H + 2 KV, D) of T: H query heads, then KV key heads, then KV value heads. Query
//     head h reads key head h / (H / KV). out, dout (B, T, H, D) of T. lse, delta (B, H, T) fp32.
//     start (B, T) int32 never falls along a row. Row offsets are long long: B * T * (H + 2 KV) * D passes
//     2^31 at B = 128, T = 8192, 36 heads of 64.
// Block: TILE rows of one head (queries; or keys, with all query heads that share them). It loops over tiles
//     of the other side, except those past the diagonal or in another document.
// Warp: WARP_ROWS rows. A lane computes one column of the scores. Of the sums it has the features lane,
//     lane + 32, ... HEAD_DIM is D rounded up to a multiple of 32, padded with zeros.
// Precision: fp32, one rounding to T at each store. Determinism: every sum has a fixed order; no atomics.
// Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax); Dao et al. 2022, arXiv:2205.14135,
//     algorithms 1 and 4. docs/kernels/attention.md compares the attention kernels.

#include "reduce.cuh"

constexpr int TILE = WARP;  // each lane computes the scores of one row of the other side
constexpr int WARPS = 4;
constexpr int WARP_ROWS = TILE / WARPS;
constexpr int VEC = 4;  // floats of a 16-byte load

struct alignas(16) Vec4 {
    float x, y, z, w;
};

// Floats between a tile's rows. The padding of 16 bytes avoids bank conflicts:
// 8 lanes that read 16 bytes of 8 rows touch each of the 32 banks once.
template <int HEAD_DIM>
constexpr int STRIDE = HEAD_DIM + VEC;

inline float minus_infinity() { return __int_as_float(0xff800000); }

// tile[row, d] = source[row * row_stride + d]; zero for row >= rows and for d >= head_dim.
template <int HEAD_DIM, typename T>
void load_tile(float* tile, const T* source, long long row_stride, int rows, int head_dim) {
    for (int i = threadIdx.x; i < TILE * HEAD_DIM; i += blockDim.x) {
        const int row = i / HEAD_DIM, d = i % HEAD_DIM;
        tile[row * STRIDE<HEAD_DIM> + d] =
            row < rows && d < head_dim ? to_float(source[row * row_stride + d]) : 0.0f;
    }
}

// dot[r] = row r of the warp's rows . the lane's row of the other tile.
template <int HEAD_DIM>
void dot_rows(float (&dot)[WARP_ROWS], const float* warp_rows, const float* other) {
    const Vec4* lane_row = reinterpret_cast<const Vec4*>(other + threadIdx.x % WARP * STRIDE<HEAD_DIM>);
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) dot[r] = 0.0f;
    for (int i = 0; i < HEAD_DIM / VEC; i++) {
        const Vec4 b = lane_row[i];
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
            const Vec4 a = reinterpret_cast<const Vec4*>(warp_rows + r * STRIDE<HEAD_DIM>)[i];  // a broadcast
            dot[r] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
    }
}

// sum[r][c] += sum over j of weight[r, j] * other[j, c * 32 + lane]; weight (WARP_ROWS, TILE) is the warp's.
template <int HEAD_DIM>
void add_weighted(float (&sum)[WARP_ROWS][HEAD_DIM / WARP], const float* weight, const float* other) {
    const int lane = threadIdx.x % WARP;
    for (int j = 0; j < TILE; j += VEC) {
        float value[VEC][HEAD_DIM / WARP];
#pragma unroll
        for (int i = 0; i < VEC; i++)
#pragma unroll
            for (int c = 0; c < HEAD_DIM / WARP; c++)
                value[i][c] = other[(j + i) * STRIDE<HEAD_DIM> + c * WARP + lane];
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
            const Vec4 w = *reinterpret_cast<const Vec4*>(weight + r * TILE + j);
#pragma unroll
            for (int c = 0; c < HEAD_DIM / WARP; c++)
                sum[r][c] += w.x * value[0][c] + w.y * value[1][c] + w.z * value[2][c] + w.w * value[3][c];
        }
    }
}

// row[d] = sum[d] * scale.
template <int HEAD_DIM, typename T>
void store_row(T* row, const float (&sum)[HEAD_DIM / WARP], float scale, int head_dim) {
#pragma unroll
    for (int c = 0; c < HEAD_DIM / WARP; c++) {
        const int d = c * WARP + threadIdx.x % WARP;
        if (d < head_dim) row[d] = from_float<T>(sum[c] * scale);
    }
}

// Grid (query tiles, H, B), longest first.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(WARPS * WARP)
    attention_forward(T* out, float* lse, const T* qkv, const int* start, int length, int heads, int kv_heads,
                      int head_dim, float scale) {
    __shared__ alignas(16) float query[TILE * STRIDE<HEAD_DIM>], key_or_value[TILE * STRIDE<HEAD_DIM>];
    __shared__ alignas(16) float probs[TILE * TILE];
    const int first = (gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y, b = blockIdx.z;
    const int kv_head = head / (heads / kv_heads);
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * WARP_ROWS;
    const long long row_stride = (long long)(heads + 2 * kv_heads) * head_dim, row = (long long)b * length;
    const T* keys = qkv + row * row_stride + (long long)(heads + kv_head) * head_dim;
    const T* values = keys + (long long)kv_heads * head_dim;
    const int end = min(first + TILE, length);

    load_tile<HEAD_DIM>(query, qkv + (row + first) * row_stride + (long long)head * head_dim, row_stride,
                        end - first, head_dim);
    float row_max[WARP_ROWS], row_sum[WARP_ROWS], acc[WARP_ROWS][HEAD_DIM / WARP] = {};
    int doc_begin[WARP_ROWS];
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        row_max[r] = minus_infinity();
        row_sum[r] = 0.0f;
        doc_begin[r] = start[row + min(first + warp_row + r, length - 1)];
    }
    for (int tile = start[row + first]; tile < end; tile += TILE) {
        __syncthreads();  // separates the reads of the previous v tile from the writes of this k tile
        load_tile<HEAD_DIM>(key_or_value, keys + tile * row_stride, row_stride, end - tile, head_dim);
        __syncthreads();  // separates the writes of k, and at first of q, from their reads
        float score[WARP_ROWS];
        dot_rows<HEAD_DIM>(score, query + warp_row * STRIDE<HEAD_DIM>, key_or_value);
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
            const int t = first + warp_row + r, j = tile + lane;
            const float s = doc_begin[r] <= j && j <= t ? score[r] * scale : minus_infinity();
            const float new_max = fmaxf(row_max[r], warp_reduce(s, Max()));
            // new_max is -inf up to the first key that the query attends to, and -inf - -inf would be NaN.
            const float safe_max = new_max == minus_infinity() ? 0.0f : new_max;
            const float p = expf(s - safe_max), rescale = expf(row_max[r] - safe_max);
            row_sum[r] = row_sum[r] * rescale + warp_reduce(p, Sum());
#pragma unroll
            for (int c = 0; c < HEAD_DIM / WARP; c++) acc[r][c] *= rescale;
            row_max[r] = new_max;
            probs[(warp_row + r) * TILE + lane] = p;
        }
        __syncthreads();  // separates the reads of k from the writes of v
        load_tile<HEAD_DIM>(key_or_value, values + tile * row_stride, row_stride, end - tile, head_dim);
        __syncthreads();  // separates the writes of v and probs from their reads
        add_weighted<HEAD_DIM>(acc, probs + warp_row * TILE, key_or_value);
    }
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        const int t = first + warp_row + r;
        if (t >= end) break;
        store_row<HEAD_DIM>(out + ((row + t) * heads + head) * head_dim, acc[r], 1.0f / row_sum[r], head_dim);
        if (lane == 0) lse[((long long)b * heads + head) * length + t] = row_max[r] + logf(row_sum[r]);
    }
}

// delta[b, h, t] = dout[b, t, h] . out[b, t, h], of the values rounded to T. LANES lanes compute one row.
template <typename T, int SIZE>
__global__ void attention_delta(float* delta, const T* dout, const T* out, long long rows, int length,
                                int heads, int head_dim) {
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
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        dot += __shfl_xor_sync(ALL_LANES, dot, offset);  // all lanes are still here
    if (row >= rows || threadIdx.x % LANES) return;
    const long long head = row % heads, position = row / heads;
    delta[(position / length * heads + head) * length + position % length] = dot;
}

// Grid (query tiles, H, B), longest first.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(WARPS * WARP, HEAD_DIM <= 64 ? 3 : 2)
    attention_backward_query(T* dqkv, const float* delta, const T* dout, const float* lse, const T* qkv,
                             const int* start, int length, int heads, int kv_heads, int head_dim,
                             float scale) {
    extern __shared__ __align__(16) float smem[];
    constexpr int SIZE = TILE * STRIDE<HEAD_DIM>;
    float *query = smem, *dout_tile = query + SIZE, *key = dout_tile + SIZE, *value = key + SIZE,
          *weight = value + SIZE;
    const int first = (gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y, b = blockIdx.z;
    const int kv_head = head / (heads / kv_heads);
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * WARP_ROWS;
    const long long row_stride = (long long)(heads + 2 * kv_heads) * head_dim, row = (long long)b * length;
    const T* keys = qkv + row * row_stride + (long long)(heads + kv_head) * head_dim;
    const T* values = keys + (long long)kv_heads * head_dim;
    const int end = min(first + TILE, length);
    const long long query_row = (row + first) * row_stride + (long long)head * head_dim;
    const long long dout_stride = (long long)heads * head_dim;

    load_tile<HEAD_DIM>(query, qkv + query_row, row_stride, end - first, head_dim);
    load_tile<HEAD_DIM>(dout_tile, dout + (row + first) * dout_stride + head * head_dim, dout_stride,
                        end - first, head_dim);
    float row_lse[WARP_ROWS], row_delta[WARP_ROWS], sum[WARP_ROWS][HEAD_DIM / WARP] = {};
    int doc_begin[WARP_ROWS];
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        const int t = min(first + warp_row + r, length - 1);
        const long long at = ((long long)b * heads + head) * length + t;
        row_lse[r] = lse[at];
        row_delta[r] = delta[at];
        doc_begin[r] = start[row + t];
    }
    for (int tile = start[row + first]; tile < end; tile += TILE) {
        __syncthreads();  // separates the reads of the previous tiles from the writes of these
        load_tile<HEAD_DIM>(key, keys + tile * row_stride, row_stride, end - tile, head_dim);
        load_tile<HEAD_DIM>(value, values + tile * row_stride, row_stride, end - tile, head_dim);
        __syncthreads();  // separates the writes of k and v, and at first of q and dout, from their reads
        float score[WARP_ROWS], dp[WARP_ROWS];
        dot_rows<HEAD_DIM>(score, query + warp_row * STRIDE<HEAD_DIM>, key);
        dot_rows<HEAD_DIM>(dp, dout_tile + warp_row * STRIDE<HEAD_DIM>, value);
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
            const int t = first + warp_row + r, j = tile + lane;
            const float p = doc_begin[r] <= j && j <= t ? expf(score[r] * scale - row_lse[r]) : 0.0f;
            weight[(warp_row + r) * TILE + lane] = p * (dp[r] - row_delta[r]);
        }
        __syncwarp();  // separates the lanes' writes of weight from the warp's reads
        add_weighted<HEAD_DIM>(sum, weight + warp_row * TILE, key);
    }
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++)
        if (first + warp_row + r < end)
            store_row<HEAD_DIM>(dqkv + query_row + (warp_row + r) * row_stride, sum[r], scale, head_dim);
}

// Grid (key tiles, KV, B): rising key tiles are longest first.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(WARPS * WARP, HEAD_DIM <= 64 ? 3 : 2)
    attention_backward_key(T* dqkv, const float* delta, const T* dout, const float* lse, const T* qkv,
                           const int* start, int length, int heads, int kv_heads, int head_dim, float scale) {
    extern __shared__ __align__(16) float smem[];
    constexpr int SIZE = TILE * STRIDE<HEAD_DIM>;
    float *key = smem, *value = key + SIZE, *query = value + SIZE, *dout_tile = query + SIZE,
          *weight = dout_tile + SIZE;
    const int first = blockIdx.x * TILE, kv_head = blockIdx.y, b = blockIdx.z, group = heads / kv_heads;
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * WARP_ROWS;
    const long long row_stride = (long long)(heads + 2 * kv_heads) * head_dim, row = (long long)b * length;
    const int end = min(first + TILE, length);
    const long long key_row = (row + first) * row_stride + (long long)(heads + kv_head) * head_dim;
    const long long value_row = key_row + (long long)kv_heads * head_dim;

    load_tile<HEAD_DIM>(key, qkv + key_row, row_stride, end - first, head_dim);
    load_tile<HEAD_DIM>(value, qkv + value_row, row_stride, end - first, head_dim);
    float dk[WARP_ROWS][HEAD_DIM / WARP] = {}, dv[WARP_ROWS][HEAD_DIM / WARP] = {};
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const float* head_lse = lse + ((long long)b * heads + head) * length;
        const float* head_delta = delta + (head_lse - lse);
        // start never falls along a row. If the document of a tile's first
        // query begins after these keys, no later query attends to them.
        for (int tile = first; tile < length && start[row + tile] < end; tile += TILE) {
            const T* queries = qkv + (row + tile) * row_stride + (long long)head * head_dim;
            const T* douts = dout + ((row + tile) * heads + head) * head_dim;
            __syncthreads();  // separates the reads of the previous tiles from the writes of these
            load_tile<HEAD_DIM>(query, queries, row_stride, length - tile, head_dim);
            load_tile<HEAD_DIM>(dout_tile, douts, (long long)heads * head_dim, length - tile, head_dim);
            __syncthreads();  // separates the writes of q and dout, and at first of k and v, from their reads
            const int t = tile + lane, inside = min(t, length - 1), doc_begin = start[row + inside];
            const float lane_lse = head_lse[inside], lane_delta = head_delta[inside];
            float p[WARP_ROWS], dp[WARP_ROWS];
            dot_rows<HEAD_DIM>(p, key + warp_row * STRIDE<HEAD_DIM>, query);
            dot_rows<HEAD_DIM>(dp, value + warp_row * STRIDE<HEAD_DIM>, dout_tile);
#pragma unroll
            for (int r = 0; r < WARP_ROWS; r++) {
                const int j = first + warp_row + r;
                p[r] = t < length && doc_begin <= j && j <= t ? expf(p[r] * scale - lane_lse) : 0.0f;
                weight[(warp_row + r) * TILE + lane] = p[r];
            }
            __syncwarp();  // separates the lanes' writes of weight from the warp's reads
            add_weighted<HEAD_DIM>(dv, weight + warp_row * TILE, dout_tile);
            __syncwarp();  // separates the reads of p from the writes of ds to the same memory
#pragma unroll
            for (int r = 0; r < WARP_ROWS; r++)
                weight[(warp_row + r) * TILE + lane] = p[r] * (dp[r] - lane_delta);
            __syncwarp();  // separates the writes of ds from the warp's reads
            add_weighted<HEAD_DIM>(dk, weight + warp_row * TILE, query);
        }
    }
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        if (first + warp_row + r >= end) break;
        store_row<HEAD_DIM>(dqkv + key_row + (warp_row + r) * row_stride, dk[r], scale, head_dim);
        store_row<HEAD_DIM>(dqkv + value_row + (warp_row + r) * row_stride, dv[r], 1.0f, head_dim);
    }
}
