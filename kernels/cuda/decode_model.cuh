// What decode_step.cu computes with: the model's tensors, the products in their order, and the stream of their weights.
#pragma once

#include "copies.cuh"
#include "vectors.cuh"

// The products of a layer, and the one behind all layers.
enum Product { QKV, PROJ, UP, DOWN, HEAD, PRODUCTS };
constexpr int OF_LAYER = 4;

// As decode_step.cu's block of comments names them. Tensors of a layer are the first layer's; `stride` elements further lie those
// of the next, in the weights (T) as in the parameters (float).
template <typename T>
struct Model {
    const float *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias, *norm_weight, *norm_bias;
    const T *qkv_weight, *qkv_bias, *proj_weight, *proj_bias, *up_weight, *up_bias, *down_weight, *down_bias, *head_weight;
    long long stride;
    int layers;

    int last() const { return layers * OF_LAYER; }
    int product(int index) const { return index == last() ? (int)HEAD : index % OF_LAYER; }

    // The tensor of the index-th product, null where there is none.
    template <typename E>
    const E* of(int index, const E* qkv, const E* proj, const E* up, const E* down, const E* head) const {
        const int which = product(index);
        if (which == HEAD) return head;
        const E* const first = which == QKV ? qkv : which == PROJ ? proj : which == UP ? up : down;
        return first ? first + index / OF_LAYER * stride : nullptr;
    }
    const T* weight(int index) const { return of(index, qkv_weight, proj_weight, up_weight, down_weight, head_weight); }
    const T* bias(int index) const { return of<T>(index, qkv_bias, proj_bias, up_bias, down_bias, nullptr); }
    const float* scale(int index) const { return of<float>(index, norm1_weight, nullptr, norm2_weight, nullptr, norm_weight); }
    const float* shift(int index) const { return of<float>(index, norm1_bias, nullptr, norm2_bias, nullptr, norm_bias); }
};

// x / by without a division, which takes some 50 ns, much of a short phase: the upper half of the product with 2^32 / by, rounded up.
// Exact for x * by < 2^32.
struct Divisor {
    unsigned inverse;  // 0 is 2^32, of 1

    void set(int by) { inverse = 0xffffffffu / by + 1; }
    int quotient(int x) const { return inverse ? (int)__umulhi(x, inverse) : x; }
};

// How a block shares out one product. Its units are pairs of outputs, `distance` apart: neighbours, or what SwiGLU or RoPE puts
// together; unit u is pair blockIdx.x + u * gridDim.x. An item, a warp's work, is one of `splits` interleaved shares of the inputs of
// a unit. Where there is more than one, a block's items are no more than its warps.
struct Shape {
    int outputs, inputs, distance, units, splits, items, stages;
    Divisor by_distance;

    // size: elements of a vector. stages: vectors of an item that a lane has of either output.
    void set(int outputs_, int inputs_, int distance_, int size) {
        outputs = outputs_, inputs = inputs_, distance = distance_;
        const int blocks = gridDim.x, block = blockIdx.x, warps = blockDim.x / WARP;
        const int pairs = (outputs + 2 * distance - 1) / (2 * distance) * distance;
        const int vectors = (inputs + size * WARP - 1) / (size * WARP);  // of a lane
        by_distance.set(distance);
        units = pairs > block ? (pairs - 1 - block) / blocks + 1 : 0;
        splits = max(1, min(warps / ((pairs + blocks - 1) / blocks), vectors));
        items = units * splits;
        stages = (vectors + splits - 1) / splits;
    }
    int pair(int unit) const { return blockIdx.x + unit * gridDim.x; }
    int first(int unit) const { return pair(unit) + by_distance.quotient(pair(unit)) * distance; }
    int second(int unit) const { return min(first(unit) + distance, outputs - 1); }  // beyond the last it is the last again
};

// A warp's first item of a product, and where its weights begin, of the first layer if it is a layer's; null where it has none. Of a
// later item, which there is only where an item is a unit, the unit is as much further as the item.
template <typename T>
struct Begin {
    const T* row[2];
    int unit, split;
};

// The weights of a warp's items, of all products one after the other, DEPTH stages ahead of their use, whatever the phase.
// A lane copies into shared memory what it will itself read, so that warps need not meet.
template <typename T, int SIZE>
struct WeightStream {
    static constexpr int DEPTH = 8;  // not tuned; a stage of 512 threads is 16 KB

    const Model<T>& model;
    const Shape* shapes;
    Begin<T>* begin;  // [PRODUCTS], this warp's
    T* ring;          // [DEPTH][2][threads] vectors
    int slot, owed;   // of the oldest stage, and how many places before it are free
    int index, item;  // of what is copied next; index is the last one's successor when there is nothing more
    int left, i;      // stages of the item, the lane's element
    const T* row[2];

    // begins: [PRODUCTS] of each warp, made here.
    WeightStream(const Model<T>& model_, const Shape* shapes_, Begin<T>* begins, T* ring_)
        : model(model_), shapes(shapes_), begin(begins + threadIdx.x / WARP * PRODUCTS), ring(ring_ + threadIdx.x * SIZE), slot(0),
          owed(DEPTH), index(-1), item(threadIdx.x / WARP) {
        if (threadIdx.x % WARP < PRODUCTS) {  // a lane each, once: what the divisions take is not paid in each layer
            find(threadIdx.x % WARP);
        }
        __syncwarp();
        next_product();
        refill();
    }

    // Until the next `stages`, DEPTH at most, have come.
    void await(int stages) {
        refill();
        await_at_most<1>(stages);
    }
    // Of these the i-th.
    void get(int i, Packed<T, SIZE> (&weight)[2]) const {
        weight[0].load(place(slot + i, 0));
        weight[1].load(place(slot + i, 1));
    }
    // They have been read.
    void release(int stages) {
        slot += stages;
        owed = stages;
    }
    // Fill the places that are free. A group of copies is a stage, an empty one at the end, so that a wait means the same all along.
    void refill() {
#pragma unroll 1  // code is read from memory, too
        for (; owed > 0; owed--) {
            if (index <= model.last()) {
                const Shape& shape = shapes[model.product(index)];
                copy(place(slot - owed, 0), row[0] + i, i < shape.inputs);
                copy(place(slot - owed, 1), row[1] + i, i < shape.inputs);
                i += shape.splits * WARP * SIZE;
                if (--left == 0) next_item();
            }
            commit_copies();
        }
    }

private:
    static_assert((DEPTH & (DEPTH - 1)) == 0);
    T* place(int at, int output) const { return ring + ((at & (DEPTH - 1)) * 2 + output) * (int)blockDim.x * SIZE; }

    template <int STAGES>
    static void await_at_most(int stages) {
        if constexpr (STAGES < DEPTH) {
            if (stages > STAGES) return await_at_most<STAGES + 1>(stages);
        }
        wait_copies<DEPTH - STAGES>();
    }

    static void copy(T* to, const T* from, bool valid) {
        if constexpr (Packed<T, SIZE>::BYTES == 16) {
            copy_async_once(shared_address(to), from, valid);  // so that the cache's keys and values stay near
        } else {
            Packed<T, SIZE> value;
            value.clear();
            if (valid) value.load(from);
            value.store(to);
        }
    }

    void find(int which) {
        const Shape& shape = shapes[which];
        const T* const weight = model.weight(which == HEAD ? model.last() : which);
        Begin<T>& found = begin[which];
        found.unit = item / shape.splits;
        found.split = item - found.unit * shape.splits;
        found.row[0] = item < shape.items ? weight + (long long)shape.first(found.unit) * shape.inputs : nullptr;
        found.row[1] = weight + (long long)shape.second(found.unit) * shape.inputs;
    }
    // On to the next item, of this product or, in most cases, of the next that has one.
    void next_item() {
        const Shape& shape = shapes[model.product(index)];
        const int unit = item;
        item += blockDim.x / WARP;
        if (item >= shape.items) return next_product();
        const int first = shape.first(item);
        row[0] += (long long)(first - shape.first(unit)) * shape.inputs;
        row[1] = row[0] + (long long)(shape.second(item) - first) * shape.inputs;
        start(shape, 0);
    }
    void next_product() {
        item = threadIdx.x / WARP;
        while (++index <= model.last()) {
            const int which = model.product(index);
            if (!begin[which].row[0]) continue;
            const long long offset = which == HEAD ? 0 : index / OF_LAYER * model.stride;
            row[0] = begin[which].row[0] + offset, row[1] = begin[which].row[1] + offset;
            return start(shapes[which], begin[which].split);
        }
    }
    void start(const Shape& shape, int split) {
        left = shape.stages;
        i = (split * WARP + threadIdx.x % WARP) * SIZE;
    }
};
