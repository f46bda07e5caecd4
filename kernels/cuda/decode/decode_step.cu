// One decode step in one launch, bf16: a few new tokens through all layers and the first prediction head.
//
//     x = token_weight[token] (+ position_weight[position])
//     x += attention(norm1(x)),  x += mlp(norm2(x))       in each layer; linear layers with or without a bias
//     norm = norm(x),  logits = norm @ head_weight^T
//
// LayerNorm if norms have a bias, else RMSNorm. QK-norm if QK_NORM, with a weight if it is not null. RoPE if
// there is a table. New keys and values are appended.
//
// Layout: ROWS = B * count rows: `count` new tokens of each of B sequences. tokens, start (ROWS,) int32;
//         length () int32: cached tokens. start is -length: a new token's position is its
//         index among the new ones, minus start.
//         token_weight (vocab, C), position_weight (context, C), table (context, 2, D / 2), norms (C,) fp32.
//         Weights (outputs, inputs), biases, keys and values (layers, B, context, KV, D), norm (ROWS, C) and
//         logits (ROWS, vocab) bf16. words: the exchange between blocks, see struct Exchange.
// Grid: one block a multiprocessor, all resident. At each | a block polls for the other blocks' results:
//       norm1, qkv | attention | proj | norm2, up | down, in each layer; then | norm, head.
// Block: outputs are partitioned across blocks (decode_model.cuh). Each block recomputes all input rows.
// Thread: the owner of a stream element keeps it in a register, and adds the proj and down outputs to it.
// Precision: bf16 MMAs, fp32 sums, fp32 stream. Norms, attended, qkv, act and results are rounded to bf16.
// Determinism: sums have a fixed order, which depends on model, GPU and position, not on ROWS. Every
//              multiply-add is an explicit fmaf: the compiler would contract them differently for other ROWS.
// Design: docs/kernels/one_launch_token.md

#include "activation.cuh"
#include "decode_matmul.cuh"
#include "decode_rows.cuh"
#include "decode_split_kv.cuh"
#include "dependent_launch.cuh"

// The inputs of a launch: the number of cached tokens, then each row's position, then each row's token. They
// may lie in host memory, where a read takes 2 us, and longer the more blocks read. So block 0 reads them and
// broadcasts them.
template <int ROWS>
constexpr int NUM_INPUTS = 1 + 2 * ROWS;

// The exchange between blocks: where each array of words begins (inter_block.cuh).
template <typename M, int ROWS>
struct Exchange {
    Word* inputs;       // (NUM_INPUTS,)
    Word* stream;       // (ROWS, DIM) fp32
    Word* qkv;          // (ROWS, QKV_WIDTH / 2), two bf16 a word
    Word* act;          // (ROWS, FFN / 2), two bf16 a word
    Word* split_stats;  // (ROWS, HEADS, KV_SPLITS, 2) and
    Word* split_out;    // (ROWS, HEADS, KV_SPLITS, HEAD_DIM) fp32, of decode_split_kv.cuh

    explicit Exchange(Word* words)
        : inputs(words), stream(inputs + ceil_div(NUM_INPUTS<ROWS>, 2) * 2), qkv(stream + ROWS * M::DIM),
          act(qkv + ROWS * M::QKV_WIDTH / 2), split_stats(act + ROWS * M::FFN / 2),
          split_out(split_stats + 2 * ROWS * M::HEADS * KV_SPLITS) {}
};

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

// The rotation of the thread's pair of qkv. It stays at the caller's 1, 0 if the pair is not rotated.
template <typename M, int ROWS>
void load_rotation(float& cosine, float& sine, const float* table, const int* positions) {
    constexpr int HEAD_DIM = M::HEAD_DIM, ROTATED = (M::HEADS + M::KV_HEADS) * HEAD_DIM;
    if (!M::ROPE || M::QK_NORM) return;  // QK-norm comes before the rotation: norm_and_rotate does both
    if (const OutputPair<Matmul<M, QKV>, ROWS> out; out.valid && out.first < ROTATED) {
        const float* const angles = table + (long long)positions[out.row] * HEAD_DIM;
        cosine = angles[out.first % HEAD_DIM], sine = angles[HEAD_DIM / 2 + out.first % HEAD_DIM];
    }
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

// smem_x = the rows of act, of width FFN.
template <typename M, int ROWS>
void load_act(bf16* smem_x, const Word* act, const LaunchTags& tags, int n) {
    for (int i = threadIdx.x * BF16_VEC; i < ROWS * M::FFN; i += THREADS * BF16_VEC) {
        unsigned x[BF16_VEC / 2];
        while (!load_published(x, act + i / 2, tags.tag(n))) {}
        bf16* const target = smem_x + i / M::FFN * ROW_STRIDE<M::FFN> + i % M::FFN;
        *reinterpret_cast<uint4*>(target) = make_uint4(x[0], x[1], x[2], x[3]);
    }
}

// Publish the activation of a pair of up's outputs.
template <bool GATED, typename Pair>
void publish_act(Word* row, const Pair& out, float a, float b, unsigned tag) {
    if (!GATED) return publish_packed(row, out, 1, a * sigmoid_of_cubic(a), b * sigmoid_of_cubic(b), tag);
    // A pair, gate and up, gives one element of act. A word holds those of an even pair and of the next pair.
    const float x = a * sigmoid(a) * b, next = __shfl_xor_sync(ALL_LANES, x, 1);
    if (out.valid && out.pair % 2 == 0) publish(row + out.first / 2, pack(x, next), tag);
}

// Grid: BLOCKS, all resident at once. Block: THREADS. BYTES: dynamic shared memory.
template <int ROWS, int REGIONS, int BYTES, int BLOCKS, int DIM, int HEADS, int KV_HEADS, int HEAD_DIM,
          int FFN, bool ROPE, bool QK_NORM, bool GATED>
__global__ void __launch_bounds__(THREADS, 1)
    decode_step(bf16* logits, bf16* norm, const int* tokens, const int* start, const int* length, bf16* keys,
                bf16* values, Word* words, unsigned* tag_counter, const float* token_weight,
                const float* position_weight, const float* table, const float* q_norm_weight,
                const float* k_norm_weight, const float* norm1_weight, const float* norm1_bias,
                const float* norm2_weight, const float* norm2_bias, const float* norm_weight,
                const float* norm_bias, const bf16* qkv_weight, const bf16* qkv_bias, const bf16* proj_weight,
                const bf16* proj_bias, const bf16* up_weight, const bf16* up_bias, const bf16* down_weight,
                const bf16* down_bias, const bf16* head_weight, long long layer_stride, int layers, int count,
                int context, int vocab, float eps) {
    using M = Model<BLOCKS, DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, ROPE, QK_NORM, GATED>;
    using Smem = SmemLayout<M, ROWS, REGIONS>;
    extern __shared__ __align__(16) unsigned char smem[];
    __shared__ RowNorm<M, ROWS> row_norm;
    __shared__ int inputs[NUM_INPUTS<ROWS>];
    __shared__ unsigned long long barriers[REGIONS];
    unsigned char* const scratch = smem + Smem::WEIGHT_BYTES;  // the input rows, or attention's buffers
    static_assert(BYTES == Smem::WEIGHT_BYTES + Smem::PARTIAL_SUM_BYTES +
                               const_max(INPUT_ROWS_BYTES<M, ROWS>, ATTENTION_BYTES<M, ROWS>));
    const Layers model = {{qkv_weight, proj_weight, up_weight, down_weight},
                          {qkv_bias, proj_bias, up_bias, down_bias}, layer_stride, layers};
    bf16* const smem_x = reinterpret_cast<bf16*>(scratch);
    float* const partial_sums = reinterpret_cast<float*>(smem + BYTES - Smem::PARTIAL_SUM_BYTES);
    const Matmuls<M, ROWS, REGIONS> matmuls = {
        model, smem, smem_x, partial_sums, Barriers(shared_address(barriers)), evict_first()};
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) matmuls.weights_arrived.init(REGIONS, 1), fence_mbarrier_init();
#endif

    const Exchange<M, ROWS> exchange(words);
    const int input = read_inputs<ROWS>(tokens, start, length, count);
    // The __syncthreads in LaunchTags also separates the initialisation of the mbarriers from their use.
    const LaunchTags tags(tag_counter);
    matmuls.template prefetch<QKV>(QKV);
    if (REGIONS > 1) matmuls.template prefetch<PROJ>(PROJ);
    if (REGIONS > 2) matmuls.template prefetch<UP>(UP), matmuls.template prefetch<DOWN>(DOWN);
    broadcast_inputs<ROWS>(inputs, exchange.inputs, input, tags.tag(1));
    const int cached_len = inputs[0], *const positions = inputs + 1, *const ids = inputs + 1 + ROWS;

    const auto load_embedding = [&](float (&x)[FP32_VEC], int r, int i) {
        float position[FP32_VEC] = {};
        load_floats(x, token_weight + (long long)ids[r] * DIM + i);
        if (position_weight) load_floats(position, position_weight + (long long)positions[r] * DIM + i);
#pragma unroll
        for (int j = 0; j < FP32_VEC; j++) x[j] += position[j];
    };
    const auto poll_stream = [&](unsigned tag) {
        return [=](float (&x)[FP32_VEC], int r, int i) {
            while (!load_published(x, exchange.stream + r * DIM + i, tag)) {}
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
    load_rotation<M, ROWS>(cosine, sine, table, positions);
    const auto add_to_stream = [&](const auto& out, float a, float b, unsigned tag) {
        own[0] += a, own[1] += b;
        if (out.valid) publish_two(exchange.stream + out.row * DIM + out.first, own[0], own[1], tag);
    };

#pragma unroll 1
    for (int i = 0; i < layers; i++) {
        const int n = i * MATMULS;
        const long long offset = i * layer_stride;
        const auto layer = [&](const float* first) { return first ? first + offset : nullptr; };
        matmuls.template run<QKV>(
            n + QKV,
            [&] {
                const float *const weight = norm1_weight + offset, *const bias = layer(norm1_bias);
                if (i == 0) row_norm.normalize(smem_x, weight, bias, eps, load_embedding, no_store);
                else row_norm.normalize(smem_x, weight, bias, eps, poll_stream(tags.tag(n + QKV)), no_store);
            },
            [&](const auto& out, float a, float b) {
                const float rotated = fmaf(a, cosine, -__fmul_rn(b, sine));
                b = fmaf(a, sine, __fmul_rn(b, cosine));
                Word* const row = exchange.qkv + out.row * M::QKV_WIDTH / 2;
                publish_packed(row, out, Matmul<M, QKV>::PAIR_STRIDE, rotated, b, tags.tag(1 + n + QKV));
            });
        const long long cache_offset = (long long)i * (ROWS / count) * context * KV_HEADS * HEAD_DIM;
        const Attention<M, ROWS> attention = {
            exchange.qkv, keys + cache_offset, values + cache_offset, exchange.split_stats,
            exchange.split_out, tags.tag(n + PROJ), tags.tag(1 + n + PROJ), cached_len, count, context,
            {layer(q_norm_weight), layer(k_norm_weight), table, positions, eps}};
        split_kv_attention(attention, scratch);
        matmuls.template run<PROJ>(
            n + PROJ, [&] { load_attended(smem_x, attention); },
            [&](const auto& out, float a, float b) { add_to_stream(out, a, b, tags.tag(1 + n + PROJ)); });
        matmuls.template run<UP>(
            n + UP,
            [&] {
                const float *const weight = norm2_weight + offset, *const bias = layer(norm2_bias);
                row_norm.normalize(smem_x, weight, bias, eps, poll_stream(tags.tag(n + UP)), no_store);
            },
            [&](const auto& out, float a, float b) {
                publish_act<GATED>(exchange.act + out.row * FFN / 2, out, a, b, tags.tag(1 + n + UP));
            });
        matmuls.template run<DOWN>(
            n + DOWN, [&] { load_act<M, ROWS>(smem_x, exchange.act, tags, n + DOWN); },
            [&](const auto& out, float a, float b) { add_to_stream(out, a, b, tags.tag(1 + n + DOWN)); });
    }
    Head<M, ROWS, Smem::WEIGHT_BYTES> head(head_weight, vocab, smem, matmuls.policy);
    if ((int)blockIdx.x < vocab / TILE)
        row_norm.normalize(smem_x, norm_weight, norm_bias, eps, poll_stream(tags.tag(layers * MATMULS)),
                           [&](int r, int i, uint2 x) {
                               if (blockIdx.x == 0) *reinterpret_cast<uint2*>(norm + r * DIM + i) = x;
                           });
    __syncthreads();  // separates the writes of smem_x from the head's reads
    // A dependent kernel starts only once all blocks are here, so it takes no place from one that polls.
    launch_dependents();
    head.multiply(logits, vocab, smem_x);
    tags.finish(1 + layers * MATMULS);
}
