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

// How a block shares out one product. Its units are pairs of outputs, `distance` apart: neighbours, or what SwiGLU or RoPE puts
// together; unit u is pair blockIdx.x + u * gridDim.x. An item, a warp's work, is one of `splits` interleaved shares of the inputs of
// a unit. Where there is more than one, a block's items are no more than its warps.
struct Shape {
    int outputs, inputs, distance, shift, units, splits, stages;

    // size: elements of a vector. stages: vectors of an item that a lane has of either output.
    void set(int outputs_, int inputs_, int distance_, int size) {
        outputs = outputs_, inputs = inputs_, distance = distance_;
        const int blocks = gridDim.x, block = blockIdx.x, warps = blockDim.x / WARP;
        const int pairs = (outputs + 2 * distance - 1) / (2 * distance) * distance;
        const int vectors = (inputs + size * WARP - 1) / (size * WARP);  // of a lane
        shift = 0;
        while (1 << shift < distance) shift++;
        units = pairs > block ? (pairs - 1 - block) / blocks + 1 : 0;
        splits = max(1, min(warps / ((pairs + blocks - 1) / blocks), vectors));
        stages = (vectors + splits - 1) / splits;
    }
    // Divisions are spared where they can be: a phase is short, and each takes some 50 ns of it.
    int first(int unit) const {
        const int pair = blockIdx.x + unit * gridDim.x;
        if (1 << shift == distance) return pair + (pair >> shift << shift);
        return pair < distance ? pair : pair + pair / distance * distance;
    }
    int unit(int item) const { return splits == 1 ? item : item / splits; }
};

// Where the weights of a warp's first item of a product begin, of the first layer if it is a layer's; null where it has no item.
template <typename T>
struct Begin {
    const T* row[2];
    int split;
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
          owed(DEPTH), index(-1), item(0) {
        if (threadIdx.x % WARP < PRODUCTS) {  // a lane each, once: what the divisions take is not paid in each layer
            const int which = threadIdx.x % WARP;
            find(begin[which], which, which == HEAD ? model.last() : which, threadIdx.x / WARP);
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
            copy_async(shared_address(to), from, valid);
        } else {
            Packed<T, SIZE> value;
            value.clear();
            if (valid) value.load(from);
            value.store(to);
        }
    }

    // Where an item's weights begin. An output beyond the last is the last again.
    void find(Begin<T>& found, int which, int of_index, int of_item) const {
        const Shape& shape = shapes[which];
        const int unit = shape.unit(of_item), first = shape.first(unit);
        const T* const weight = model.weight(of_index);
        const bool there = of_item < shape.units * shape.splits;
        found.split = of_item - unit * shape.splits;
        found.row[0] = there ? weight + (long long)first * shape.inputs : nullptr;
        found.row[1] = weight + (long long)min(first + shape.distance, shape.outputs - 1) * shape.inputs;
    }
    // On to the next item, of this product or, in most cases, of the next that has one.
    void next_item() {
        item += blockDim.x / WARP;
        const int which = model.product(index);
        if (item >= shapes[which].units * shapes[which].splits) return next_product();
        Begin<T> found;
        find(found, which, index, item);
        start(shapes[which], found, 0);
    }
    void next_product() {
        item = threadIdx.x / WARP;
        while (++index <= model.last()) {
            const int which = model.product(index);
            if (begin[which].row[0]) return start(shapes[which], begin[which], which == HEAD ? 0 : index / OF_LAYER * model.stride);
        }
    }
    void start(const Shape& shape, const Begin<T>& found, long long offset) {
        row[0] = found.row[0] + offset, row[1] = found.row[1] + offset;
        left = shape.stages;
        i = (found.split * WARP + threadIdx.x % WARP) * SIZE;
    }
};
