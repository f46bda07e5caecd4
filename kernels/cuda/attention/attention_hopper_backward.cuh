// The gradient's third warpgroup, and what it shares with the others: items of work and the places in shared memory.
// attention_hopper_backward.cu says what all this is for.
#pragma once

#include "attention_hopper.cuh"

// Fewer where rows are long: s, dout . v, dk and dv are all in registers.
template <int HEAD_DIM>
constexpr int QUERIES = HEAD_DIM == 64 ? 128 : 64;

// Whether an item's keys and values fit where one ds does.
template <int HEAD_DIM>
constexpr bool ROTATE = QUERIES<HEAD_DIM> == 2 * HEAD_DIM;

constexpr int STAGES = 2;
constexpr int ITEMS = 4;      // one that is taken, one that is multiplied, and one whose dq is passed on; a power of two
constexpr int PART = 64 * 64;  // floats of dq that a warpgroup adds at a time
constexpr int ALL_GROUPS = GROUPS * WARPGROUP;
constexpr int PAUSE_NS = 64;  // between two looks at the turns

// What a block works on: keys of one head of one sequence, and the queries that see them. No tiles: nothing is left.
struct Item {
    int first, shared, b;  // first key, its head, its sequence
    int tile, tiles;       // of the queries that see one of these keys
    int head, heads_end;   // query heads that share the keys

    // Item `number` of all.
    Item(int number, int length, int group_heads, int kv_heads) {
        const int key_tiles = (length + KEYS - 1) / KEYS, rest = number / key_tiles;
        first = (key_tiles - 1 - number % key_tiles) * KEYS;
        shared = rest % kv_heads;
        b = rest / kv_heads;
        tile = tiles = 0;
        head = shared * group_heads;
        heads_end = head + group_heads;
    }

    // A warp. start never falls, so the tiles that see one of these keys are those up to the last that begins before their end.
    template <int TILE>
    void find_tiles(const int* start, int length) {
        const int* starts = start + (long long)b * length;
        tile = first / TILE;
        for (int lane = threadIdx.x % WARP, seen = WARP; seen == WARP; tiles += seen) {
            const int query = (tile + tiles + lane) * TILE;
            const bool sees = query < length && starts[min(query, length - 1)] < first + KEYS;
            seen = __popc(__ballot_sync(ALL_LANES, sees));
        }
    }

    int steps() const { return (heads_end - head) * tiles; }

    // One of its rows of `partial`.
    float* row(float* partial, int group, int length, int width) const {
        const int key_tiles = (length + KEYS - 1) / KEYS;
        return partial + (long long)((b * key_tiles + first / KEYS) * GROUPS + group) * width;
    }
};

// Addresses in shared memory.
template <int HEAD_DIM>
struct Layout {
    static constexpr int KEY_BYTES = KEYS * HEAD_DIM * 2, QUERY_BYTES = QUERIES<HEAD_DIM> * HEAD_DIM * 2;
    static constexpr int DS_BYTES = KEYS * QUERIES<HEAD_DIM> * 2, DQ_BYTES = PART * 4, ROW_BYTES = QUERIES<HEAD_DIM> * 4;
    unsigned keys, ds;       // at first, see Places
    unsigned queries, douts;
    unsigned dq, dq_before;  // what a warpgroup adds to dq, and to what
    unsigned rows, begins;   // of each query lse and delta; where its document begins among the item's keys, a byte
    Barriers key_full, key_empty, query_full, dout_full, empty, dq_full, dq_empty, before_full;
    Item* items;             // ITEMS

    explicit Layout(unsigned char* memory)
        : keys(shared_address(memory)), ds(keys + 2 * KEY_BYTES), queries(ds + 2 * DS_BYTES),
          douts(queries + STAGES * QUERY_BYTES), dq(douts + STAGES * QUERY_BYTES), dq_before(dq + GROUPS * DQ_BYTES),
          rows(dq_before + GROUPS * DQ_BYTES), begins(rows + STAGES * 2 * ROW_BYTES),
          key_full(begins + STAGES * QUERIES<HEAD_DIM>), key_empty(key_full.end(2)), query_full(key_empty.end(1)),
          dout_full(query_full.end(STAGES)), empty(dout_full.end(STAGES)), dq_full(empty.end(STAGES)),
          dq_empty(dq_full.end(GROUPS)), before_full(dq_empty.end(GROUPS)),
          items(reinterpret_cast<Item*>(memory + (before_full.end(GROUPS) - keys))) {}

    void init() const {
        key_full.init(2, 1);  // keys with the item, values
        key_empty.init(1, ALL_GROUPS / WARP + GROUPS);
        query_full.init(STAGES, WARP);
        dout_full.init(STAGES, 1);
        empty.init(STAGES, ALL_GROUPS / WARP);
        dq_full.init(GROUPS, WARPGROUP / WARP);
        dq_empty.init(GROUPS, 1);
        before_full.init(GROUPS, 1);
        fence_mbarrier_init();
    }
};

// Where an item's keys lie, with its values behind them, and this step's ds; the next step's is in the third place.
template <int HEAD_DIM>
struct Places {
    unsigned keys, ds, sum;

    explicit Places(const Layout<HEAD_DIM>& at) : keys(at.keys), ds(at.ds), sum(at.keys + 2 * at.ds + at.DS_BYTES) {}

    void next_step() { ds = sum - keys - ds; }

    // The next item's keys take the ds that has been free since its last step but one; where they were, dk and dv leave.
    void next_item() {
        if (!ROTATE<HEAD_DIM>) return;
        const unsigned free = ds;
        next_step();
        keys = free;
    }
};

// A warp: takes the next item, to its place.
template <int HEAD_DIM>
void take_item(Item& place, int* taken, const int* start, int batch, int length, int heads, int kv_heads) {
    const int number = __shfl_sync(ALL_LANES, threadIdx.x % WARP == 0 ? atomicAdd(taken, 1) : 0, 0);
    Item item(number, length, heads / kv_heads, kv_heads);
    if (item.b < batch) item.find_tiles<QUERIES<HEAD_DIM>>(start, length);
    if (threadIdx.x % WARP == 0) place = item;
    __syncwarp();  // it is there, for this warp; the keys' barrier says so to the others
}

// A warp: takes items and copies what they need, until nothing is left.
template <int HEAD_DIM>
void copy_items(const Layout<HEAD_DIM>& at, const TensorMap& dout_map, const TensorMap& qkv_map, unsigned char* memory,
                int* taken, const float* delta, const float* lse, const int* start, int batch, int length, int heads,
                int kv_heads) {
    constexpr int TILE = QUERIES<HEAD_DIM>;
    const int lane = threadIdx.x % WARP;
    float* rows = reinterpret_cast<float*>(memory + (at.rows - at.keys)) + lane;
    unsigned char* begins = memory + (at.begins - at.keys) + lane;
    Places<HEAD_DIM> places(at);
    unsigned step = 0;  // of all items
    const auto wait_empty = [&](unsigned step) { wait(at.empty[step % STAGES], step / STAGES % 2 ^ 1); };
    // Queries, with what belongs to them.
    const auto copy_tile = [&](const Item& item, int head, int tile) {
        const unsigned stage = step % STAGES;
        float row_lse[TILE / WARP], row_delta[TILE / WARP];
        unsigned char row_begin[TILE / WARP];
#pragma unroll
        for (int i = 0; i < TILE / WARP; i++) {
            const int query = tile * TILE + i * WARP + lane, inside = min(query, length - 1);
            const long long index = ((long long)item.b * heads + head) * length + inside;
            row_lse[i] = query < length ? lse[index] * LOG2_E : -minus_infinity();  // p = 0 past the end
            row_delta[i] = delta[index];
            row_begin[i] = min(max(start[(long long)item.b * length + inside] - item.first, 0), KEYS);
        }
        wait_empty(step);
#pragma unroll
        for (int i = 0; i < TILE / WARP; i++) {
            rows[stage * 2 * TILE + i * WARP] = row_lse[i];
            rows[stage * 2 * TILE + i * WARP + TILE] = row_delta[i];
            begins[stage * TILE + i * WARP] = row_begin[i];
        }
        if (lane == 0) {
            const int row = tile * TILE, place = stage * at.QUERY_BYTES;
            load_rows<HEAD_DIM, TILE>(at.queries + place, qkv_map, at.query_full[stage], head, row, item.b);
            load_rows<HEAD_DIM, TILE>(at.douts + place, dout_map, at.dout_full[stage], head, row, item.b);
        } else {
            arrive(at.query_full[stage]);
        }
    };

    for (unsigned round = 0;; round++) {
        Item& item = at.items[round % ITEMS];
        take_item<HEAD_DIM>(item, taken, start, batch, length, heads, kv_heads);
        const unsigned begin = step;
        for (int head = item.head; head < item.heads_end; head++)
            for (int tile = item.tile; tile < item.tile + item.tiles; tile++, step++) {
                copy_tile(item, head, tile);
                if (step > begin) continue;
                wait_empty(step + 1);  // the last step has used its tile, and the values
                wait(at.key_empty[0], round % 2 ^ 1);
                if (lane == 0) {
                    const int key_head = heads + item.shared;
                    load_rows<HEAD_DIM, KEYS>(places.keys, qkv_map, at.key_full[0], key_head, item.first, item.b);
                    load_rows<HEAD_DIM, KEYS>(places.keys + at.KEY_BYTES, qkv_map, at.key_full[1], key_head + kv_heads,
                                              item.first, item.b);
                }
                __syncwarp();
            }
        if (step == begin) {
            wait_empty(step);
            arrive(at.query_full[step % STAGES]);  // the last step multiplies what lies there, for nothing
            wait(at.key_empty[0], round % 2 ^ 1);
            if (lane == 0) arrive(at.key_full[0]);
            return;
        }
        if ((step - begin) % 2) places.next_step();
        places.next_item();
    }
}

// The item that comes with the keys. It stays at least until the warp gives the next one's back.
template <int HEAD_DIM>
const Item& receive_item(const Layout<HEAD_DIM>& at, unsigned round) {
    wait(at.key_full[0], round % 2);
    return at.items[round % ITEMS];
}

template <int HEAD_DIM>
void give_back(const Layout<HEAD_DIM>& at) {
    __syncwarp();  // all have seen the keys arrive
    if (threadIdx.x % WARP == 0) arrive(at.key_empty[0]);
}

// A warp: passes on what warpgroup `group` has added up for dq, in turn. Not `ordered`, only the first and the last keep theirs.
template <int HEAD_DIM>
void pass_dq(const Layout<HEAD_DIM>& at, int group, const unsigned char* memory, bf16* dqkv, float* dq_sum, int* turns,
             float* partial, const int* start, int length, int heads, int kv_heads, bool ordered, float scale) {
    constexpr int TILE = QUERIES<HEAD_DIM>, BYTES = Layout<HEAD_DIM>::DQ_BYTES;
    constexpr int WRITERS = HEAD_DIM == 64 ? 4 : 8;  // lanes, 4 a row of partial: at D = 128 a group has all queries, for both
    const int lane = threadIdx.x % WARP, tiles = (length + TILE - 1) / TILE, width = (heads + 2 * kv_heads) * HEAD_DIM;
    const int rows_from = HEAD_DIM == 64 ? group * 64 : 0, columns_from = HEAD_DIM == 64 ? 0 : group * 64;
    const float4* add = reinterpret_cast<const float4*>(memory + (at.dq - at.keys) + group * BYTES) + lane;
    const float4* before = reinterpret_cast<const float4*>(memory + (at.dq_before - at.keys) + group * BYTES) + lane;
    unsigned step = 0, loads = 0;  // of all items
    for (unsigned round = 0;; round++) {
        const Item& item = receive_item(at, round);
        give_back(at);
        if (item.tiles == 0) return;
        for (int head = item.head; head < item.heads_end; head++) {
            const int column = head * HEAD_DIM + columns_from + lane % 4 * 2;
            float sums[16] = {};  // of the lane's columns, over the rows that it has stored
            for (int tile = item.tile; tile < item.tile + item.tiles; tile++, step++) {
                const long long index = (((long long)item.b * heads + head) * tiles + tile) * GROUPS + group;
                float* sum = dq_sum + index * PART;
                const int turn = (tile * TILE - item.first) / KEYS;  // from the diagonal
                const bool last = start[(long long)item.b * length + tile * TILE] >= item.first;
                if (turn > 0) {
                    // All lanes look, so that they stay together; seldom, as those that are waited for use the memory, too.
                    const int least = ordered || last ? turn : 1;
                    while (__any_sync(ALL_LANES, load_acquire(turns + index) < least)) __nanosleep(PAUSE_NS);
                    fence_async_proxy_global();  // the copy engine, too, comes after the acquire
                    if (last && lane == 0) {
                        arrive_expecting(at.before_full[group], BYTES);
                        bulk_load(at.dq_before + group * BYTES, sum, BYTES, at.before_full[group]);
                    }
                }
                wait(at.dq_full[group], step % 2);
                __syncwarp();  // all have seen it: once lane 0 gives dq back, the next phase may end
                if (!last) {
                    if (lane == 0) {
                        if (turn > 0)
                            bulk_reduce_add(sum, at.dq + group * BYTES, BYTES);
                        else
                            bulk_store(sum, at.dq + group * BYTES, BYTES);
                        bulk_commit();
                        bulk_wait_read();
                        arrive(at.dq_empty[group]);
                        bulk_wait();
                        fence_async_proxy_global();
                        add_release(turns + index);
                    }
                    __syncwarp();  // the others would only spin
                    continue;
                }
                if (turn > 0) wait(at.before_full[group], loads++ % 2);
                const int query = tile * TILE + rows_from + lane / 4;
                bf16* target = dqkv + ((long long)item.b * length + query) * width + column;
#pragma unroll 1
                for (int warp = 0; warp < WARPGROUP / WARP; warp++)  // the fragments of its lanes
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        float4 value = add[j * WARPGROUP + warp * WARP];
                        if (turn > 0) {
                            const float4 rest = before[j * WARPGROUP + warp * WARP];
                            value = {rest.x + value.x, rest.y + value.y, rest.z + value.z, rest.w + value.w};
                        }
                        sums[2 * j] += value.x + value.z;  // rows past the end are 0
                        sums[2 * j + 1] += value.y + value.w;
                        const int row = query + warp * 16;
                        unsigned* pair = reinterpret_cast<unsigned*>(target + (long long)warp * 16 * width + j * 8);
                        if (row < length) *pair = pack(value.x * scale, value.y * scale);
                        if (row + 8 < length) pair[4 * width] = pack(value.z * scale, value.w * scale);
                    }
                __syncwarp();  // all have read the part
                if (lane == 0) arrive(at.dq_empty[group]);
            }
            if (!partial) continue;
            float* to = item.row(partial, HEAD_DIM == 64 ? group : lane / 4 % GROUPS, length, width) + column;
#pragma unroll
            for (int i = 0; i < 16; i++) {
#pragma unroll
                for (int offset = WARP / 2; offset >= WRITERS; offset /= 2)
                    sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], offset);
                if (lane < WRITERS) to[i / 2 * 8 + i % 2] = sums[i] * scale;
            }
        }
    }
}
