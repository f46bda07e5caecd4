// One pass of the whole model over a few new tokens behind a cache, in bf16: all layers and the first prediction head in one launch.
//
//     x = token_weight[token] (+ position_weight[position])
//     x += attention(norm1(x)),  x += mlp(norm2(x))       in each layer, each linear layer with a bias or without
//     norm = norm(x),  logits = norm @ head_weight^T
//
// with layernorm where norms have a bias, else rmsnorm; RoPE where there is a table; SwiGLU or GELU. The new tokens' keys and values
// are appended to the cache.
//
// Layout: rows = B * count. tokens, start (rows,) int32, length () int32: what the cache holds already, start being -length, so that a
//         token's position in the cache is its place among the new ones - start; token_weight (vocab, C),
//         position_weight (context, C), table (context, 2, D / 2), norms (C,) fp32; linear weights (outputs, inputs) and biases of
//         bf16, as are keys and values (layers, B, context, KV, D), norm (rows, C) and logits (rows, vocab). words: what blocks hand
//         each other (inter_block.cuh): 1 + 2 rows numbers given, the stream (rows, C) fp32, qkv (rows, (H + 2 KV) D) and act (rows, F),
//         two bf16 a word, and the shares of decode_split_kv.cuh.
// Work: a block on each multiprocessor goes through the phases norm1 and qkv | attention | proj | norm2 and up | down of each
//       layer, and through norm and head, each as soon as it finds what the others have made before the |. It shares out a product as
//       decode_model.cuh says; each block makes all of the product's input rows anew, in shared memory. The thread that owns an
//       element of the stream adds to it in both products that do, and keeps it.
// Tags: what the n-th product of a launch makes is published with tag 1 + n, so its inputs, of the product before, carry tag n:
//
//     phase       reads                        publishes               n = 4 layer +
//     qkv         stream (embedding at first)  qkv                     0
//     attention   qkv                          shares, as proj's       1
//     proj        shares, of its own tag       stream                  1
//     up          stream                       act                     2
//     down        act                          stream                  3
//
// Latency: a phase's few bytes take less time than the way to memory. So the weights of the products to come are on their way
//       whatever the phase; what else it needs of memory is asked for before the block waits for the others; and the model's
//       sizes are constants, so that a phase has few instructions. What is left is mostly the way of words between blocks.
// Precision: products of bf16, summed in fp32; norms, attended rows, qkv, act and the results are rounded to bf16, the stream is not.
// Determinism: every sum has a fixed order, which depends on the model, the GPU and the row's position, but not on ROWS; multiply-adds
//              are written out, since the compiler would choose others for other ROWS.
// Source: the combination of shares, Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.

#include "activation.cuh"
#include "decode_rows.cuh"
#include "decode_split_kv.cuh"
#include "dependent_launch.cuh"

// The tensors of the first layer; `stride` elements further lie those of the next, in the weights (bf16) as in the parameters (float).
struct Layers {
    const float *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;
    const bf16 *weight[PRODUCTS], *bias[PRODUCTS];
    long long stride;
    int layers;
};

// What the products of a launch, one after the other, work with. The n-th is of layer n / PRODUCTS.
template <typename M, int ROWS, int REGIONS>
struct Products {
    const Layers& model;
    unsigned char* const weights;  // shared memory, as are
    bf16* const rows;
    float* const sums;
    const Barriers arrived;  // of each region
    const unsigned long long policy;

    template <int WHICH>
    void fetch(int n) const {
        const bf16* const weight = model.weight[WHICH] + n / PRODUCTS * model.stride;
        unsigned char* const region = weights + Memory<M, ROWS, REGIONS>::begin(WHICH);
        if (n < model.layers * PRODUCTS) fetch_weights<Product<M, WHICH>>(region, weight, arrived[n % REGIONS], policy);
        else cp_async_commit();  // an empty group, so that a wait means the same all along
    }
    // rows, once make() has made them, times the weights of the n-th product: finish(result, a, b) gets a thread's pair of outputs. The
    // warp comes together, threads without a pair among it.
    template <int WHICH, typename Make, typename Finish>
    void run(int n, Make make, Finish finish) const {
        using P = Product<M, WHICH>;
        const Result<P, ROWS> result;
        const bool has_bias = model.bias[WHICH] != nullptr;
        bf16 bias[2];
        if (has_bias && result.valid) {  // on its way while the block waits
            const bf16* const first = model.bias[WHICH] + n / PRODUCTS * model.stride + result.first;
            bias[0] = first[0], bias[1] = first[P::DISTANCE];
        }
        // A block without a part in the product must not wait for its rows: nobody waits for it, so they may be gone.
        if (P::tiles() > 0) make();
        await_weights<REGIONS - 1>(arrived[n % REGIONS], n / REGIONS % 2);
        __syncthreads();  // the rows, written above, are read by all warps
        multiply<P, ROWS>(sums, weights + Memory<M, ROWS, REGIONS>::begin(WHICH), rows);
        __syncthreads();  // the items' sums, written above, are added up below; and the rows are read no more
        if (threadIdx.x / WARP * WARP < P::MOST * ROWS * PAIRS) {  // the whole warp
            float a, b;
            result.add_up(a, b, sums);
            if (has_bias) a += to_float(bias[0]), b += to_float(bias[1]);
            finish(result, a, b);
        }
        fetch<(WHICH + REGIONS) % PRODUCTS>(n + REGIONS);
    }
};

// Two neighbouring bf16 numbers a word: a pair's own where its outputs are neighbours, else those of two pairs.
template <typename Result>
void publish_packed(Word* row, const Result& result, int distance, float a, float b, unsigned tag) {
    if (distance == 1) {
        if (result.valid) publish(row + result.first / 2, pack(a, b), tag);
        return;
    }
    const bool odd = result.pair % 2;
    const float other = __shfl_xor_sync(ALL_LANES, odd ? a : b, 1);  // of pairs p and p + 1, the one gets both a, the other both b
    const int at = odd ? result.first - 1 + distance : result.first;
    if (result.valid) publish(row + at / 2, odd ? pack(other, b) : pack(a, other), tag);
}

// What a launch is given: what the cache holds, and of each row its position and its token. It may lie in the host's memory, 2 us away
// and further the more blocks ask: block 0 asks, and hands it on.
template <int ROWS>
constexpr int GIVEN = 1 + 2 * ROWS;

template <int ROWS>
int ask(const int* tokens, const int* start, const int* length, int count) {
    const int row = (int)threadIdx.x - 1;
    if (blockIdx.x > 0 || threadIdx.x >= GIVEN<ROWS>) return 0;
    if (row < 0) return *length;
    return row < ROWS ? row % count - start[row] : tokens[row - ROWS];
}

template <int ROWS>
void hand_on(int* given, Word* words, int asked, unsigned tag) {
    if (threadIdx.x < GIVEN<ROWS>) {
        if (blockIdx.x == 0) publish(words + threadIdx.x, (unsigned)asked, tag);
        unsigned come[1];
        while (!load_published(come, words + threadIdx.x, tag)) {}
        given[threadIdx.x] = (int)come[0];
    }
    __syncthreads();  // what was given, written above, is read by all
}

// Grid: BLOCKS, which are on the GPU at once. Block: THREADS. BYTES: of shared memory.
template <int ROWS, int REGIONS, int BYTES, int BLOCKS, int DIM, int HEADS, int KV_HEADS, int HEAD_DIM, int FFN, bool ROPE, bool GATED>
__global__ void __launch_bounds__(THREADS, 1)
    decode_step(bf16* logits, bf16* norm, const int* tokens, const int* start, const int* length, bf16* keys, bf16* values, Word* words,
                unsigned* tag_memory, const float* token_weight, const float* position_weight, const float* table,
                const float* norm1_weight, const float* norm1_bias, const float* norm2_weight, const float* norm2_bias,
                const float* norm_weight, const float* norm_bias, const bf16* qkv_weight, const bf16* qkv_bias,
                const bf16* proj_weight, const bf16* proj_bias, const bf16* up_weight, const bf16* up_bias, const bf16* down_weight,
                const bf16* down_bias, const bf16* head_weight, long long stride, int layers, int count, int context, int vocab,
                float eps) {
    using M = Model<BLOCKS, DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, ROPE, GATED>;
    using Of = Memory<M, ROWS, REGIONS>;
    constexpr int WIDTH = M::WIDTH;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Norm<M, ROWS> normalise;
    __shared__ int given[GIVEN<ROWS>];
    __shared__ unsigned long long barriers[REGIONS];
    unsigned char* const scratch = memory + Of::WEIGHTS;  // the rows, or what makes shares
    static_assert(BYTES == Of::WEIGHTS + Of::SUMS + larger(ROWS_BYTES<M, ROWS>, SHARES_BYTES<M, ROWS>));
    const Layers model = {norm1_weight, norm1_bias, norm2_weight, norm2_bias, {qkv_weight, proj_weight, up_weight, down_weight},
                          {qkv_bias, proj_bias, up_bias, down_bias}, stride, layers};
    bf16* const rows = reinterpret_cast<bf16*>(scratch);
    float* const sums = reinterpret_cast<float*>(memory + BYTES - Of::SUMS);
    const Products<M, ROWS, REGIONS> products = {model, memory, rows, sums, Barriers(shared_address(barriers)), evict_first()};
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) products.arrived.init(REGIONS, 1), fence_mbarrier_init();
#endif

    const int asked = ask<ROWS>(tokens, start, length, count);
    const Tags tags(tag_memory);  // the block meets, and so the barriers are ready for all
    products.template fetch<QKV>(QKV);
    if (REGIONS > 1) products.template fetch<PROJ>(PROJ);
    if (REGIONS > 2) products.template fetch<UP>(UP), products.template fetch<DOWN>(DOWN);
    hand_on<ROWS>(given, words, asked, tags.of(1));
    const int held = given[0], *const positions = given + 1, *const ids = given + 1 + ROWS;

    Word* const stream = words + parts(GIVEN<ROWS>, 2) * 2;
    Word* const qkv = stream + ROWS * DIM;
    Word* const act = qkv + ROWS * WIDTH / 2;
    Word* const state = act + ROWS * FFN / 2;
    Word* const share_sums = state + 2 * ROWS * HEADS * SHARES;

    const auto embedding = [&](float (&x)[PART], int r, int i) {
        float at_position[PART] = {};
        load_floats(x, token_weight + (long long)ids[r] * DIM + i);
        if (position_weight) load_floats(at_position, position_weight + (long long)positions[r] * DIM + i);
#pragma unroll
        for (int j = 0; j < PART; j++) x[j] += at_position[j];
    };
    const auto from_stream = [&](unsigned tag) {
        return [=](float (&x)[PART], int r, int i) { while (!load_published(x, stream + r * DIM + i, tag)) {} };
    };
    const auto keep_none = [](int, int, uint2) {};

    // The pair of elements of the stream that the thread owns, and what turns its pair of qkv.
    float own[2] = {}, cosine = 1.0f, sine = 0.0f;
    if (const Result<Product<M, PROJ>, ROWS> result; result.valid) {
        float x[PART];
        embedding(x, result.row, result.first / PART * PART);
        own[0] = result.first % PART ? x[2] : x[0], own[1] = result.first % PART ? x[3] : x[1];
    }
    if (const Result<Product<M, QKV>, ROWS> result; ROPE && result.valid && result.first < (HEADS + KV_HEADS) * HEAD_DIM) {
        const float* const angles = table + (long long)positions[result.row] * HEAD_DIM;
        cosine = angles[result.first % HEAD_DIM], sine = angles[HEAD_DIM / 2 + result.first % HEAD_DIM];
    }
    const auto add_to_stream = [&](const auto& result, float a, float b, unsigned tag) {
        own[0] += a, own[1] += b;
        if (result.valid) publish_two(stream + result.row * DIM + result.first, own[0], own[1], tag);
    };

#pragma unroll 1
    for (int i = 0; i < layers; i++) {
        const int n = i * PRODUCTS;
        const long long parameters = i * stride;
        const auto of_layer = [&](const float* bias) { return bias ? bias + parameters : nullptr; };
        products.template run<QKV>(
            n + QKV,
            [&] {
                const float *const scale = norm1_weight + parameters, *const bias = of_layer(norm1_bias);
                if (i == 0) normalise.make(rows, scale, bias, eps, embedding, keep_none);
                else normalise.make(rows, scale, bias, eps, from_stream(tags.of(n + QKV)), keep_none);
            },
            [&](const auto& result, float a, float b) {
                const float turned = fmaf(a, cosine, -__fmul_rn(b, sine));
                b = fmaf(a, sine, __fmul_rn(b, cosine));
                publish_packed(qkv + result.row * WIDTH / 2, result, Product<M, QKV>::DISTANCE, turned, b, tags.of(1 + n + QKV));
            });
        const long long cached = (long long)i * (ROWS / count) * context * KV_HEADS * HEAD_DIM;
        const Attention<M, ROWS> attention = {qkv, keys + cached, values + cached, state, share_sums,
                                              tags.of(n + PROJ), tags.of(1 + n + PROJ), held, count, context};
        make_shares(attention, scratch);
        products.template run<PROJ>(
            n + PROJ,
            [&] {
#pragma unroll 1
                for (int at = threadIdx.x * 2; at < ROWS * DIM; at += THREADS * 2) {
                    const int r = at / DIM, column = at % DIM;
                    const float2 x = load_attended(attention, r, column / HEAD_DIM, column % HEAD_DIM);
                    *reinterpret_cast<unsigned*>(rows + r * ROW_STRIDE<DIM> + column) = pack(x.x, x.y);
                }
            },
            [&](const auto& result, float a, float b) { add_to_stream(result, a, b, tags.of(1 + n + PROJ)); });
        products.template run<UP>(
            n + UP,
            [&] {
                const float* const bias = of_layer(norm2_bias);
                normalise.make(rows, norm2_weight + parameters, bias, eps, from_stream(tags.of(n + UP)), keep_none);
            },
            [&](const auto& result, float a, float b) {
                Word* const row = act + result.row * FFN / 2;
                const unsigned tag = tags.of(1 + n + UP);
                if (!GATED) return publish_packed(row, result, 1, a * sigmoid_of_cubic(a), b * sigmoid_of_cubic(b), tag);
                const float x = a * sigmoid(a) * b, after = __shfl_xor_sync(ALL_LANES, x, 1);  // two pairs' are neighbours
                if (result.valid && result.pair % 2 == 0) publish(row + result.first / 2, pack(x, after), tag);
            });
        products.template run<DOWN>(
            n + DOWN,
            [&] {
                for (int at = threadIdx.x * VECTOR; at < ROWS * FFN; at += THREADS * VECTOR) {
                    unsigned x[VECTOR / 2];
                    while (!load_published(x, act + at / 2, tags.of(n + DOWN))) {}
                    *reinterpret_cast<uint4*>(rows + at / FFN * ROW_STRIDE<FFN> + at % FFN) = make_uint4(x[0], x[1], x[2], x[3]);
                }
            },
            [&](const auto& result, float a, float b) { add_to_stream(result, a, b, tags.of(1 + n + DOWN)); });
    }
    const int last = layers * PRODUCTS;
    Head<M, ROWS, Of::WEIGHTS> head(head_weight, vocab, memory, products.policy);
    if ((int)blockIdx.x < vocab / TILE)
        normalise.make(rows, norm_weight, norm_bias, eps, from_stream(tags.of(last)), [&](int r, int i, uint2 x) {
            if (blockIdx.x == 0) *reinterpret_cast<uint2*>(norm + r * DIM + i) = x;
        });
    __syncthreads();  // the rows, written above, are read by all warps
    launch_dependents();  // when all blocks have come so far, and so are on the GPU. This kernel itself starts behind the end of others.
    head.multiply(logits, vocab, rows);
    tags.end(1 + last);
}
