// One decode step of the whole model in one launch, bf16: all layers and the first prediction head, for a few
// new tokens.
//
//     x = token_weight[token] (+ position_weight[position])
//     x += attention(norm1(x)),  x += mlp(norm2(x))       in each layer; linear layers with or without a bias
//     norm = norm(x),  logits = norm @ head_weight^T
//
// LayerNorm if norms have a bias, else RMSNorm; RoPE if there is a table; SwiGLU or GELU. Appends to the KV
// cache.
//
// Layout: ROWS = B * count rows, `count` new tokens of each of B sequences. tokens, start (ROWS,) int32;
//         length () int32: cached tokens; start = -length. A token's position is its index among the new ones
//         minus start. Weights (outputs, inputs) and biases bf16; token_weight (vocab, C), position_weight
//         (context, C), table (context, 2, D / 2) and norms (C,) fp32; keys, values (layers, B, context, KV,
//         D), norm (ROWS, C) and logits (ROWS, vocab) bf16. words (inter_block.cuh): 1 + 2 ROWS inputs;
//         stream (ROWS, C) fp32; qkv and act, two bf16 a word; split_stats and split_out of
//         decode_split_kv.cuh.
// Grid: one block a multiprocessor, all resident. Per layer: norm1, qkv | attention | proj | norm2, up |
//       down. Then norm, head. At each | a block polls for the other blocks' results.
//       docs/kernels/one_launch_token.md has a drawing.
// Block: matmul outputs are partitioned across blocks (decode_model.cuh). Each block recomputes all input
//        rows.
// Thread: an element of the stream stays in a register of its owner, which adds both the proj and the down
//         output to it.
// Precision: bf16 MMAs with fp32 sums. The stream is fp32. Norms, attended, qkv, act and the results are
//            rounded to bf16.
// Determinism: sums have a fixed order, which depends on model, GPU and position, not on ROWS. Multiply-adds
//              are written out, as the compiler would contract them differently for other ROWS.

#include "activation.cuh"
#include "decode_rows.cuh"
#include "decode_split_kv.cuh"
#include "dependent_launch.cuh"

// The tensors of layer 0. Those of layer i lie i * stride elements further, both the bf16 and the fp32 ones.
struct Layers {
    const float *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;
    const bf16 *weight[MATMULS], *bias[MATMULS];
    long long stride;
    int layers;
};

// The matmuls of a launch, numbered n = layer * MATMULS + kind.
//
// Tags: results of matmul n are published with tag 1 + n. So its inputs, from the matmul before, carry tag n:
//
//     phase       polls for                          publishes                    n = 4 layer +
//     qkv         stream (embedding in layer 0)      qkv                          0
//     attention   qkv                                splits, with proj's tag      1
//     proj        splits, with its own tag           stream                       1
//     up          stream                             act                          2
//     down        act                                stream                       3
template <typename M, int ROWS, int REGIONS>
struct Matmuls {
    const Layers& model;
    // Shared memory:
    unsigned char* const weights;
    bf16* const smem_x;
    float* const partial_sums;
    const Barriers weights_arrived;  // one mbarrier a region
    const unsigned long long policy;

    template <int KIND>
    void prefetch(int n) const {
        const bf16* const weight = model.weight[KIND] + n / MATMULS * model.stride;
        unsigned char* const region = weights + SmemLayout<M, ROWS, REGIONS>::region_offset(KIND);
        if (n < model.layers * MATMULS)
            prefetch_weights<Matmul<M, KIND>>(region, weight, weights_arrived[n % REGIONS], policy);
        else
            cp_async_commit();  // an empty group, so cp_async_wait counts the same throughout
    }
    // Matmul n. load_x() writes the input rows to smem_x. finish(out, a, b) receives the thread's pair of
    // outputs; it is called by whole warps, threads without a pair included.
    template <int KIND, typename LoadX, typename Finish>
    void run(int n, LoadX load_x, Finish finish) const {
        using P = Matmul<M, KIND>;
        const OutputPair<P, ROWS> out;
        const bool has_bias = model.bias[KIND] != nullptr;
        bf16 bias[2];
        if (has_bias && out.valid) {  // in flight while the block polls
            const bf16* const first = model.bias[KIND] + n / MATMULS * model.stride + out.first;
            bias[0] = first[0], bias[1] = first[P::PAIR_STRIDE];
        }
        // A block without tiles must not poll for inputs. No block waits for it, so its inputs may already be
        // overwritten.
        if (P::tiles() > 0) load_x();
        wait_weights<REGIONS - 1>(weights_arrived[n % REGIONS], n / REGIONS % 2);
        __syncthreads();  // separates the writes of smem_x, and the weights' arrival, from the matmul's reads
        multiply<P, ROWS>(partial_sums, weights + SmemLayout<M, ROWS, REGIONS>::region_offset(KIND), smem_x);
        // Separates the writes of partial_sums from their reads below, and the reads of smem_x and of the
        // weights from the next writes there.
        __syncthreads();
        if (threadIdx.x / WARP * WARP < P::MAX_TILES_PER_BLOCK * ROWS * PAIRS) {  // warp-uniform
            float a, b;
            out.reduce(a, b, partial_sums);
            if (has_bias) a += to_float(bias[0]), b += to_float(bias[1]);
            finish(out, a, b);
        }
        prefetch<(KIND + REGIONS) % MATMULS>(n + REGIONS);
    }
};

// Publish a pair of outputs as bf16, two neighbouring elements a word. With stride > 1 the neighbours of a
// pair's outputs belong to the next pair, so lanes of neighbouring pairs exchange: the even one gets both a,
// the odd one both b.
template <typename Pair>
void publish_packed(Word* row, const Pair& out, int stride, float a, float b, unsigned tag) {
    if (stride == 1) {
        if (out.valid) publish(row + out.first / 2, pack(a, b), tag);
        return;
    }
    const bool odd = out.pair % 2;
    const float other = __shfl_xor_sync(ALL_LANES, odd ? a : b, 1);
    const int column = odd ? out.first - 1 + stride : out.first;
    if (out.valid) publish(row + column / 2, odd ? pack(other, b) : pack(a, other), tag);
}

// The inputs of a launch: the number of cached tokens, then each row's position, then each row's token. They
// may lie in host memory, where a read takes 2 us, and longer the more blocks read. So block 0 reads them and
// broadcasts them.
template <int ROWS>
constexpr int NUM_INPUTS = 1 + 2 * ROWS;

// The input of this thread, if it is in block 0.
template <int ROWS>
int read_inputs(const int* tokens, const int* start, const int* length, int count) {
    const int row = (int)threadIdx.x - 1;
    if (blockIdx.x > 0 || threadIdx.x >= NUM_INPUTS<ROWS>) return 0;
    if (row < 0) return *length;
    return row < ROWS ? row % count - start[row] : tokens[row - ROWS];
}

template <int ROWS>
void broadcast_inputs(int* inputs, Word* words, int input, unsigned tag) {
    if (threadIdx.x < NUM_INPUTS<ROWS>) {
        if (blockIdx.x == 0) publish(words + threadIdx.x, (unsigned)input, tag);
        unsigned received[1];
        while (!load_published(received, words + threadIdx.x, tag)) {}
        inputs[threadIdx.x] = (int)received[0];
    }
    __syncthreads();  // separates the writes of `inputs` from all reads
}

// smem_x = the attended rows, of width DIM.
template <typename M, int ROWS>
void load_attended(bf16* smem_x, const Attention<M, ROWS>& attention) {
#pragma unroll 1
    for (int i = threadIdx.x * 2; i < ROWS * M::DIM; i += THREADS * 2) {
        const int row = i / M::DIM, column = i % M::DIM;
        const float2 x = combine_splits(attention, row, column / M::HEAD_DIM, column % M::HEAD_DIM);
        *reinterpret_cast<unsigned*>(smem_x + row * ROW_STRIDE<M::DIM> + column) = pack(x.x, x.y);
    }
}

// Grid: BLOCKS, all resident at once. Block: THREADS. BYTES: dynamic shared memory.
template <int ROWS, int REGIONS, int BYTES, int BLOCKS, int DIM, int HEADS, int KV_HEADS, int HEAD_DIM, int FFN,
          bool ROPE, bool GATED>
__global__ void __launch_bounds__(THREADS, 1)
    decode_step(bf16* logits, bf16* norm, const int* tokens, const int* start, const int* length, bf16* keys,
                bf16* values, Word* words, unsigned* tag_counter, const float* token_weight,
                const float* position_weight, const float* table, const float* norm1_weight, const float* norm1_bias,
                const float* norm2_weight, const float* norm2_bias, const float* norm_weight, const float* norm_bias,
                const bf16* qkv_weight, const bf16* qkv_bias, const bf16* proj_weight, const bf16* proj_bias,
                const bf16* up_weight, const bf16* up_bias, const bf16* down_weight, const bf16* down_bias,
                const bf16* head_weight, long long layer_stride, int layers, int count, int context, int vocab,
                float eps) {
    using M = Model<BLOCKS, DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, ROPE, GATED>;
    using Smem = SmemLayout<M, ROWS, REGIONS>;
    constexpr int WIDTH = M::QKV_WIDTH;
    extern __shared__ __align__(16) unsigned char smem[];
    __shared__ RowNorm<M, ROWS> row_norm;
    __shared__ int inputs[NUM_INPUTS<ROWS>];
    __shared__ unsigned long long barriers[REGIONS];
    unsigned char* const scratch = smem + Smem::WEIGHT_BYTES;  // the input rows, or attention's buffers
    static_assert(BYTES == Smem::WEIGHT_BYTES + Smem::PARTIAL_SUM_BYTES +
                               const_max(INPUT_ROW_BYTES<M, ROWS>, ATTENTION_BYTES<M, ROWS>));
    const Layers model = {norm1_weight,
                          norm1_bias,
                          norm2_weight,
                          norm2_bias,
                          {qkv_weight, proj_weight, up_weight, down_weight},
                          {qkv_bias, proj_bias, up_bias, down_bias},
                          layer_stride,
                          layers};
    bf16* const smem_x = reinterpret_cast<bf16*>(scratch);
    float* const partial_sums = reinterpret_cast<float*>(smem + BYTES - Smem::PARTIAL_SUM_BYTES);
    const Matmuls<M, ROWS, REGIONS> matmuls = {
        model, smem, smem_x, partial_sums, Barriers(shared_address(barriers)), evict_first()};
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) matmuls.weights_arrived.init(REGIONS, 1), fence_mbarrier_init();
#endif

    const int input = read_inputs<ROWS>(tokens, start, length, count);
    const LaunchTags tags(tag_counter);  // its __syncthreads also separates the mbarriers' initialisation from their use
    matmuls.template prefetch<QKV>(QKV);
    if (REGIONS > 1) matmuls.template prefetch<PROJ>(PROJ);
    if (REGIONS > 2) matmuls.template prefetch<UP>(UP), matmuls.template prefetch<DOWN>(DOWN);
    broadcast_inputs<ROWS>(inputs, words, input, tags.tag(1));
    const int cached_len = inputs[0], *const positions = inputs + 1, *const ids = inputs + 1 + ROWS;

    Word* const stream = words + ceil_div(NUM_INPUTS<ROWS>, 2) * 2;
    Word* const qkv = stream + ROWS * DIM;
    Word* const act = qkv + ROWS * WIDTH / 2;
    Word* const split_stats = act + ROWS * FFN / 2;
    Word* const split_out = split_stats + 2 * ROWS * HEADS * KV_SPLITS;

    const auto load_embedding = [&](float (&x)[FP32_VEC], int r, int i) {
        float position[FP32_VEC] = {};
        load_floats(x, token_weight + (long long)ids[r] * DIM + i);
        if (position_weight) load_floats(position, position_weight + (long long)positions[r] * DIM + i);
#pragma unroll
        for (int j = 0; j < FP32_VEC; j++) x[j] += position[j];
    };
    const auto poll_stream = [&](unsigned tag) {
        return [=](float (&x)[FP32_VEC], int r, int i) {
            while (!load_published(x, stream + r * DIM + i, tag)) {}
        };
    };
    const auto no_store = [](int, int, uint2) {};

    // The thread's own pair of stream elements, and the rotation of its pair of qkv: the same in all layers.
    float own[2] = {}, cosine = 1.0f, sine = 0.0f;
    if (const OutputPair<Matmul<M, PROJ>, ROWS> out; out.valid) {
        float x[FP32_VEC];
        load_embedding(x, out.row, out.first / FP32_VEC * FP32_VEC);
        own[0] = out.first % FP32_VEC ? x[2] : x[0], own[1] = out.first % FP32_VEC ? x[3] : x[1];
    }
    if (const OutputPair<Matmul<M, QKV>, ROWS> out;
        ROPE && out.valid && out.first < (HEADS + KV_HEADS) * HEAD_DIM) {
        const float* const angles = table + (long long)positions[out.row] * HEAD_DIM;
        cosine = angles[out.first % HEAD_DIM], sine = angles[HEAD_DIM / 2 + out.first % HEAD_DIM];
    }
    const auto add_to_stream = [&](const auto& out, float a, float b, unsigned tag) {
        own[0] += a, own[1] += b;
        if (out.valid) publish_two(stream + out.row * DIM + out.first, own[0], own[1], tag);
    };

#pragma unroll 1
    for (int i = 0; i < layers; i++) {
        const int n = i * MATMULS;
        const long long offset = i * layer_stride;
        const auto bias_of_layer = [&](const float* bias) { return bias ? bias + offset : nullptr; };
        matmuls.template run<QKV>(
            n + QKV,
            [&] {
                const float *const weight = norm1_weight + offset, *const bias = bias_of_layer(norm1_bias);
                if (i == 0) row_norm.normalize(smem_x, weight, bias, eps, load_embedding, no_store);
                else row_norm.normalize(smem_x, weight, bias, eps, poll_stream(tags.tag(n + QKV)), no_store);
            },
            [&](const auto& out, float a, float b) {
                const float rotated = fmaf(a, cosine, -__fmul_rn(b, sine));
                b = fmaf(a, sine, __fmul_rn(b, cosine));
                const int stride = Matmul<M, QKV>::PAIR_STRIDE;
                publish_packed(qkv + out.row * WIDTH / 2, out, stride, rotated, b, tags.tag(1 + n + QKV));
            });
        const long long cache_offset = (long long)i * (ROWS / count) * context * KV_HEADS * HEAD_DIM;
        const Attention<M, ROWS> attention = {
            qkv, keys + cache_offset, values + cache_offset, split_stats, split_out, tags.tag(n + PROJ),
            tags.tag(1 + n + PROJ), cached_len, count, context};
        split_kv_attention(attention, scratch);
        matmuls.template run<PROJ>(
            n + PROJ, [&] { load_attended(smem_x, attention); },
            [&](const auto& out, float a, float b) { add_to_stream(out, a, b, tags.tag(1 + n + PROJ)); });
        matmuls.template run<UP>(
            n + UP,
            [&] {
                const float *const weight = norm2_weight + offset, *const bias = bias_of_layer(norm2_bias);
                row_norm.normalize(smem_x, weight, bias, eps, poll_stream(tags.tag(n + UP)), no_store);
            },
            [&](const auto& out, float a, float b) {
                Word* const row = act + out.row * FFN / 2;
                const unsigned tag = tags.tag(1 + n + UP);
                if (!GATED) {
                    return publish_packed(row, out, 1, a * sigmoid_of_cubic(a), b * sigmoid_of_cubic(b), tag);
                }
                // Each pair gives one element of act. A word holds those of an even pair and the next one.
                const float x = a * sigmoid(a) * b, next = __shfl_xor_sync(ALL_LANES, x, 1);
                if (out.valid && out.pair % 2 == 0) publish(row + out.first / 2, pack(x, next), tag);
            });
        matmuls.template run<DOWN>(
            n + DOWN,
            [&] {
                for (int at = threadIdx.x * BF16_VEC; at < ROWS * FFN; at += THREADS * BF16_VEC) {
                    unsigned x[BF16_VEC / 2];
                    while (!load_published(x, act + at / 2, tags.tag(n + DOWN))) {}
                    bf16* const target = smem_x + at / FFN * ROW_STRIDE<FFN> + at % FFN;
                    *reinterpret_cast<uint4*>(target) = make_uint4(x[0], x[1], x[2], x[3]);
                }
            },
            [&](const auto& out, float a, float b) { add_to_stream(out, a, b, tags.tag(1 + n + DOWN)); });
    }
    const int last = layers * MATMULS;
    Head<M, ROWS, Smem::WEIGHT_BYTES> head(head_weight, vocab, smem, matmuls.policy);
    if ((int)blockIdx.x < vocab / TILE)
        row_norm.normalize(smem_x, norm_weight, norm_bias, eps, poll_stream(tags.tag(last)),
                           [&](int r, int i, uint2 x) {
                               if (blockIdx.x == 0) *reinterpret_cast<uint2*>(norm + r * DIM + i) = x;
                           });
    __syncthreads();  // separates the writes of smem_x from the head's reads
    // Programmatic dependent launch: the next kernel may start once every block has come here, so all are
    // resident. This kernel itself is launched without it, and starts after the kernel before has ended.
    launch_dependents();
    head.multiply(logits, vocab, smem_x);
    tags.finish(1 + last);
}
