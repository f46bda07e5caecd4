// One pass of the whole model over a few new tokens behind a cache: all layers and the first prediction head in one launch.
//
//     x = token_weight[token] (+ position_weight[position])
//     x += attention(norm1(x)),  x += mlp(norm2(x))       in each layer, each linear layer with a bias or without
//     norm = norm(x),  logits = norm @ head_weight^T
//
// with layernorm where norms have a bias, else rmsnorm; RoPE where there is a table; SwiGLU or GELU. The new tokens' keys and values
// are appended to the cache.
//
// Layout: rows = B * count. tokens, start (rows,) int32, length () int32: what the cache holds already; token_weight (vocab, C),
//         position_weight (context, C), table (context, 2, D / 2), norms (C,) fp32; linear weights (outputs, inputs) and biases of T,
//         as are keys and values (layers, B, context, KV, D), norm (rows, C) and logits (rows, vocab). words: what blocks hand each
//         other (handover.cuh), the stream (rows, C), qkv (rows, H + 2 KV, D), act (rows, F) and the shares of decode_shares.cuh.
// Work: a block on each multiprocessor goes through the phases norm1 and qkv | attention | proj | norm2 and up | down of each
//       layer, and through norm and head, each as soon as it finds what the others have made before the |. For a product a block owns
//       pairs of outputs, a warp sums an item of them (decode_model.cuh); each block makes all of the product's input rows anew, in
//       shared memory. The block that owns an element of the stream adds to it in both products that do, and keeps it.
// Latency: a phase's few bytes take less time than the way to memory. So weights are on their way stages ahead, whatever the phase;
//       what else a phase needs of memory is asked for before the block waits for the others.
// Precision: fp32 arithmetic; qkv, act and the results are rounded to T, norms and attended rows are not.
// Determinism: every sum has a fixed order, which depends on the model, the GPU and the row's position, but not on ROWS; multiply-adds
//              are written out, since the compiler would choose others for other ROWS.
// Source: the combination of shares, Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.

#include "activation.cuh"
#include "decode_rows.cuh"
#include "decode_shares.cuh"
#include "overlap.cuh"

// What comes to the sums of a unit: fetched an item ahead, by the lanes that add it, and not touched before.
template <typename T>
struct Added {
    T bias[2];
    float cosine, sine;
};

// Of one product, a row's pair of outputs after the other; finish(row, unit, a, b) gets them, and `added` of the unit is fetched by
// fetch(unit) one item before. All warps of the block.
template <typename T, int SIZE, int ROWS, typename Fetch, typename Finish>
void multiply(WeightStream<T, SIZE>& weights, const float* rows, Block<T, ROWS>& block, int which, Fetch fetch, Finish finish) {
    constexpr int DEPTH = WeightStream<T, SIZE>::DEPTH;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    const Shape& shape = block.shape[which];
    const Begin<T>& begin = block.begin[warp * PRODUCTS + which];
    const int items = shape.items, splits = shape.splits, split = begin.split;
    for (int round = 0; round < items; round += warps) {  // a block's warps go round equally often, for they meet
        const int item = round + warp, unit = begin.unit + round;
        float own[2] = {};  // of the lane's row
        if (item < items) {
            float sums[2][ROWS] = {};
            int i = (split * WARP + lane) * SIZE;
#pragma unroll 1
            for (int first = 0; first < shape.stages; first += DEPTH) {
                const int stages = min(DEPTH, shape.stages - first);
                weights.await(stages);
#pragma unroll(ROWS == 1 ? 2 : 1)  // more would not fit into the registers
                for (int s = 0; s < stages; s++, i += splits * WARP * SIZE) {
                    const int at = min(i, shape.inputs - SIZE);  // beyond the last there are weights of 0
                    Packed<T, SIZE> w[2];
                    weights.get(s, w);
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        float x[SIZE];
                        load_held<SIZE>(x, rows + r * shape.inputs, at, shape.inputs);
#pragma unroll
                        for (int j = 0; j < SIZE; j++)
#pragma unroll
                            for (int o = 0; o < 2; o++) sums[o][r] = fmaf(x[j], w[o](j), sums[o][r]);
                    }
                }
                weights.release(stages);
            }
#pragma unroll
            for (int o = 0; o < 2; o++)
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float sum = warp_reduce(sums[o][r], Sum());
                    if (lane == r) own[o] = sum;
                }
        }
        const bool finishes = item < items && split == 0 && lane < ROWS;
        if (splits > 1) {  // then there is one round
            if (lane < ROWS) block.of_warp[warp][0][lane] = own[0], block.of_warp[warp][1][lane] = own[1];
            __syncthreads();  // the shares, written above, are added up by the unit's first warp
            for (int i = 1; finishes && i < splits; i++)
                own[0] += block.of_warp[warp + i][0][lane], own[1] += block.of_warp[warp + i][1][lane];
        }
        if (finishes) {
            finish(lane, unit, own[0], own[1]);
            if (item + warps < items) fetch(unit + warps);
        }
    }
}

// SIZE elements of act, from i on. `paired`: a word holds two of bf16, so that every block has less to read.
template <typename T, int SIZE>
void load_act(float (&to)[SIZE], const Word* act, int i, bool paired, unsigned tag) {
    if constexpr (SIZE == 8) {
        if (paired) {
            float two[SIZE / 2];
            while (!load_published(two, act + i / 2, tag)) {}
            Packed<T, SIZE> both;
#pragma unroll
            for (int j = 0; j < SIZE / 2; j++) both.word[j] = __float_as_uint(two[j]);
#pragma unroll
            for (int j = 0; j < SIZE; j++) to[j] = both(j);
            return;
        }
    }
    while (!load_published(to, act + i, tag)) {}
}

// Grid: blocks that are on the GPU at once. Block: whole warps, MOST_THREADS at most. row_floats: the floats of shared memory for the
// products' input rows, or for the shares.
template <typename T, int SIZE, int ROWS, int MOST>
__global__ void __launch_bounds__(MOST_THREADS<SIZE>, 1)
    decode_step(T* logits, T* norm, const int* tokens, const int* start, const int* length, T* keys, T* values, Word* words,
                unsigned* tag_memory, const float* token_weight, const float* position_weight, const float* table,
                const float* norm1_weight, const float* norm1_bias,
                const float* norm2_weight, const float* norm2_bias, const float* norm_weight, const float* norm_bias,
                const T* qkv_weight, const T* qkv_bias, const T* proj_weight, const T* proj_bias, const T* up_weight,
                const T* up_bias, const T* down_weight, const T* down_bias, const T* head_weight, long long stride, int layers,
                int count, int context, int heads, int kv_heads, int head_dim, int ffn, int vocab, bool gated, float eps,
                int row_floats) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Block<T, ROWS> block;
    const Model<T> model = {norm1_weight, norm1_bias, norm2_weight, norm2_bias, norm_weight, norm_bias, qkv_weight, qkv_bias,
                            proj_weight, proj_bias, up_weight, up_bias, down_weight, down_bias, head_weight, stride, layers};
    const int dim = heads * head_dim, lane = threadIdx.x % WARP, half = head_dim / 2;
    T* const ring = reinterpret_cast<T*>(memory);
    float* const rows = reinterpret_cast<float*>(ring + WeightStream<T, SIZE>::DEPTH * 2 * blockDim.x * SIZE);
    float* const owned = rows + row_floats;  // [units][2][ROWS] of the stream
    // May lie in the host's memory, 2 us away: a block asks once, and for all at the same time.
    int given = 0;
    if (threadIdx.x < 1 + 2 * ROWS) {
        const int i = threadIdx.x - 1;
        given = *(i < 0 ? length : i < ROWS ? start + i : tokens + (i - ROWS));
    }
    if (threadIdx.x < PRODUCTS) {  // a thread each, for divisions take their time
        const int which = threadIdx.x, distance = which == QKV && table ? half : which == UP && gated ? ffn : 1;
        const int up = gated ? 2 * ffn : ffn, all_heads = (heads + 2 * kv_heads) * head_dim;
        const int outputs = which == QKV ? all_heads : which == UP ? up : which == HEAD ? vocab : dim;
        block.shape[which].set(outputs, which == DOWN ? ffn : dim, distance, SIZE);
    }
    block.norm.set(dim, SIZE == 1 ? 1 : 4);
    __syncthreads();  // what is written above is read by all
    WeightStream<T, SIZE> weights(model, block.shape, block.begin, ring);
    if (threadIdx.x == 0) block.held = given;
    else if (threadIdx.x <= ROWS) block.position[threadIdx.x - 1] = (threadIdx.x - 1) % count - given;
    else if (threadIdx.x <= 2 * ROWS) block.token[threadIdx.x - 1 - ROWS] = given;
    const Tags tags(tag_memory);  // the block meets, and what is written above is read by all
    // (ROWS, dim), (ROWS, H + 2 KV, D), (ROWS, ffn), and those of Attention.
    Word* const stream = words;
    Word* const qkv = stream + ROWS * dim;
    Word* const act = qkv + ROWS * (heads + 2 * kv_heads) * head_dim;
    const bool paired = SIZE == 8 && !gated;

    Added<T> added = {};
    for (int index = 0;; index++) {
        const int which = model.product(index);
        const Shape& shape = block.shape[which];
        const unsigned tag = tags.of(1 + index), tag_before = tags.of(index);
        // A block without a part in the product must not wait for its rows: nobody waits for it, so they may be gone.
        const bool reads = shape.units > 0;
        const auto fetch = [&](int unit) {
            if (which == HEAD) return;
            const int first = shape.first(unit), second = first + shape.distance;
            const T* const bias = model.bias(index);
            if (bias) added.bias[0] = bias[first];
            if (bias && second < shape.outputs) added.bias[1] = bias[second];
            if (table && which == QKV) {
                const int position = block.position[lane], angle = 2 * shape.pair(unit) - first;  // first % half
                added.cosine = table[(long long)position * 2 * half + angle];
                added.sine = table[((long long)position * 2 + 1) * half + angle];
            }
        };
        const auto fetch_first = [&] {
            const int warp = threadIdx.x / WARP;
            if (warp < shape.items && lane < ROWS) fetch(block.begin[warp * PRODUCTS + which].unit);
        };
        if (which != PROJ) fetch_first();
        if (which == PROJ) {
            const long long cached = (long long)(index / OF_LAYER) * (ROWS / count) * context * kv_heads * head_dim;
            Word* const state = words + (ROWS * (2 * dim + 2 * kv_heads * head_dim + ffn) + 1) / 2 * 2;  // two are loaded at once
            const Attention<T, ROWS> attention = {qkv, keys + cached, values + cached, state, state + 2 * ROWS * heads * SHARES,
                                                  tag_before, tag, block.held, count, context, heads, kv_heads, head_dim};
            make_shares<MOST, T, SIZE, ROWS>(attention, rows);
            fetch_first();
            constexpr int PART = SIZE > 1 && ROWS == 1 ? 2 : 1;  // more rows would take too many registers
#pragma unroll 1
            for (int i = threadIdx.x * PART; reads && i < ROWS * dim; i += blockDim.x * PART) {
                const int r = ROWS == 1 ? 0 : i / dim, column = i - r * dim;
                float x[PART];
                load_attended(x, attention, r, column / head_dim, column % head_dim);
#pragma unroll
                for (int j = 0; j < PART; j++) rows[r * dim + held_at<SIZE>(column, dim) + j] = x[j];
            }
        } else if (which == DOWN) {
            for (int i = threadIdx.x * SIZE; reads && i < ROWS * ffn; i += blockDim.x * SIZE) {
                float x[SIZE];
                load_act<T>(x, act, i, paired, tag_before);
                const int r = ROWS == 1 ? 0 : i / ffn;
                hold<SIZE>(rows + r * ffn, i - r * ffn, ffn, x);
            }
        } else if (reads) {
            const auto load = [&](auto& x, int r, int i) {
                constexpr int PART = sizeof(x) / sizeof(float);
                if (index == 0) {
                    float at_position[PART] = {};
                    load_floats(x, token_weight + (long long)block.token[r] * dim + i);
                    if (position_weight) load_floats(at_position, position_weight + (long long)block.position[r] * dim + i);
#pragma unroll
                    for (int j = 0; j < PART; j++) x[j] += at_position[j];
                } else {
                    while (!load_published(x, stream + r * dim + i, tag_before)) {}
                }
            };
            const auto keep_owned = [&] {
                const int pairs = block.shape[DOWN].units;
                for (int i = threadIdx.x; i < pairs * 2 * ROWS; i += blockDim.x) {
                    const int r = i % ROWS, output = block.shape[DOWN].first(i / (2 * ROWS)) + i / ROWS % 2;
                    if (output < dim) owned[i] = rows[r * dim + held_at<SIZE>(output, dim)];
                }
            };
            const auto store = [&](int r, int i, float x) {
                if (which == HEAD && blockIdx.x == 0) norm[r * dim + i] = from_float<T>(x);
            };
            make_norm<SIZE>(rows, block, model.scale(index), model.shift(index), dim, eps, load, index == 0, keep_owned, store);
        }
        __syncthreads();  // the rows, written above, are read by all warps
        if (which == HEAD) let_next_start();  // when all blocks have come so far, and so are on the GPU
        multiply<T, SIZE, ROWS>(weights, rows, block, which, fetch, [&](int r, int unit, float a, float b) {
            const int first = shape.first(unit), second = first + shape.distance;
            if (which == HEAD) {
                logits[(long long)r * vocab + first] = from_float<T>(a);
                if (second < vocab) logits[(long long)r * vocab + second] = from_float<T>(b);
                return;
            }
            if (qkv_bias) a += to_float(added.bias[0]), b += to_float(added.bias[1]);
            if (which == PROJ || which == DOWN) {
                float* const own = owned + unit * 2 * ROWS + r;
                publish(stream + r * dim + first, own[0] += a, tag);
                if (second < dim) publish(stream + r * dim + second, own[ROWS] += b, tag);
                return;
            }
            if (which == UP && gated) {
                publish(act + r * ffn + first, to_float(from_float<T>(a * sigmoid(a) * b)), tag);
                return;
            }
            if (which == UP) a *= sigmoid_of_cubic(a), b *= sigmoid_of_cubic(b);
            if (which == QKV && table && first < (heads + kv_heads) * head_dim) {
                const float turned = fmaf(a, added.cosine, -b * added.sine);
                b = fmaf(a, added.sine, b * added.cosine);
                a = turned;
            }
            if (which == UP && paired) {
                publish(act + (r * ffn + first) / 2, __uint_as_float(pack(a, b)), tag);
                return;
            }
            Word* const out = (which == QKV ? qkv : act) + r * shape.outputs;
            publish(out + first, to_float(from_float<T>(a)), tag);
            if (second < shape.outputs) publish(out + second, to_float(from_float<T>(b)), tag);
        });
        if (which == HEAD) break;
        weights.refill();
        __syncthreads();  // separates the reads of the rows from the next product's writes
    }
    tags.end(1 + model.last());
}
