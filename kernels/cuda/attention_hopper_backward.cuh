// The gradient's third warpgroup, and what it shares with the others: the places in shared memory and which part of the work the
// block does. attention_hopper_backward.cu says what all this is for.
#pragma once

#include "attention_hopper.cuh"

// Fewer where rows are long: s, dout . v, dk and dv are all in registers.
template <int HEAD_DIM>
constexpr int QUERIES = HEAD_DIM == 64 ? 128 : 64;

constexpr int STAGES = 2;
constexpr int PART = 64 * 64;  // floats of dq that a warpgroup adds at a time
constexpr int ALL_GROUPS = GROUPS * WARPGROUP;
constexpr int PAUSE_NS = 64;  // between two looks at the turns

// Addresses in shared memory.
template <int HEAD_DIM>
struct Layout {
    static constexpr int KEY_BYTES = KEYS * HEAD_DIM * 2, QUERY_BYTES = QUERIES<HEAD_DIM> * HEAD_DIM * 2;
    static constexpr int DS_BYTES = KEYS * QUERIES<HEAD_DIM> * 2, DQ_BYTES = PART * 4, ROW_BYTES = QUERIES<HEAD_DIM> * 4;
    unsigned keys, values, queries, douts, ds;
    unsigned dq, dq_before;  // what a warpgroup adds to dq, and to what
    unsigned rows, begins;   // of each query lse and delta; where its document begins among the block's keys, a byte
    Barriers key_full, query_full, dout_full, empty, dq_full, dq_empty, before_full;
    unsigned number;         // of the block among those that have started

    explicit Layout(const void* memory)
        : keys(shared_address(memory)), values(keys + KEY_BYTES), queries(values + KEY_BYTES),
          douts(queries + STAGES * QUERY_BYTES), ds(douts + STAGES * QUERY_BYTES), dq(ds + 2 * DS_BYTES),
          dq_before(dq + GROUPS * DQ_BYTES), rows(dq_before + GROUPS * DQ_BYTES), begins(rows + STAGES * 2 * ROW_BYTES),
          key_full(begins + STAGES * QUERIES<HEAD_DIM>), query_full(key_full.end(2)), dout_full(query_full.end(STAGES)),
          empty(dout_full.end(STAGES)), dq_full(empty.end(STAGES)), dq_empty(dq_full.end(GROUPS)),
          before_full(dq_empty.end(GROUPS)), number(before_full.end(GROUPS)) {}

    void init() const {
        key_full.init(2, 1);  // keys, values
        query_full.init(STAGES, WARP);
        dout_full.init(STAGES, 1);
        empty.init(STAGES, ALL_GROUPS / WARP);
        dq_full.init(GROUPS, WARPGROUP / WARP);
        dq_empty.init(GROUPS, 1);
        before_full.init(GROUPS, 1);
        fence_barrier_init();
    }
};

// Which part of the work the block does; all warps find it alike.
struct Part {
    int first, shared, b;  // first key, its head, its sequence
    int tile, tiles;       // of the queries that see one of these keys
    int head, heads_end;   // query heads that share the keys
    long long row;         // of the sequence

    Part(int number, int length, int group_heads, int kv_heads) {
        const int key_tiles = (length + KEYS - 1) / KEYS, rest = number / key_tiles;
        first = (key_tiles - 1 - number % key_tiles) * KEYS;
        shared = rest % kv_heads;
        b = rest / kv_heads;
        head = shared * group_heads;
        heads_end = head + group_heads;
        row = (long long)b * length;
    }

    // start never falls, so the tiles that see one of these keys are those up to the last that begins before their end.
    template <int TILE>
    void find_tiles(const int* start, int length) {
        tile = first / TILE;
        tiles = 0;
        for (int lane = threadIdx.x % WARP, seen = WARP; seen == WARP; tiles += seen) {
            const int query = (tile + tiles + lane) * TILE;
            const bool sees = query < length && start[row + min(query, length - 1)] < first + KEYS;
            seen = __popc(__ballot_sync(ALL_LANES, sees));
        }
    }
};

// One thread: keys and values.
template <int HEAD_DIM>
void copy_keys(const Layout<HEAD_DIM>& at, const Part& part, const TensorMap& qkv_map, int heads, int kv_heads) {
    load_rows<HEAD_DIM, KEYS>(at.keys, qkv_map, at.key_full[0], heads + part.shared, part.first, part.b);
    load_rows<HEAD_DIM, KEYS>(at.values, qkv_map, at.key_full[1], heads + kv_heads + part.shared, part.first, part.b);
}

// A warp: tile after tile of queries with what belongs to them, until all of them have been multiplied.
template <int HEAD_DIM>
void copy_queries(const Layout<HEAD_DIM>& at, const Part& part, const TensorMap& dout_map, const TensorMap& qkv_map, float* rows,
                  unsigned char* begins, const float* delta, const float* lse, const int* start, int length, int heads) {
    constexpr int TILE = QUERIES<HEAD_DIM>;
    const int lane = threadIdx.x % WARP;
    int step = 0;
    for (int head = part.head; head < part.heads_end; head++)
        for (int tile = part.tile; tile < part.tile + part.tiles; tile++, step++) {
            const int stage = step % STAGES;
            float row_lse[TILE / WARP], row_delta[TILE / WARP];
            unsigned char row_begin[TILE / WARP];
#pragma unroll
            for (int i = 0; i < TILE / WARP; i++) {
                const int query = tile * TILE + i * WARP + lane, inside = min(query, length - 1);
                const long long index = ((long long)part.b * heads + head) * length + inside;
                row_lse[i] = query < length ? lse[index] * LOG2_E : -minus_infinity();  // p = 0 past the end
                row_delta[i] = delta[index];
                row_begin[i] = min(max(start[part.row + inside] - part.first, 0), KEYS);
            }
            wait(at.empty[stage], step / STAGES % 2 ^ 1);
            float* own = rows + stage * 2 * TILE + lane;
#pragma unroll
            for (int i = 0; i < TILE / WARP; i++) {
                own[i * WARP] = row_lse[i];
                own[i * WARP + TILE] = row_delta[i];
                begins[stage * TILE + i * WARP + lane] = row_begin[i];
            }
            if (lane == 0) {
                const int row = tile * TILE, place = stage * at.QUERY_BYTES;
                load_rows<HEAD_DIM, TILE>(at.queries + place, qkv_map, at.query_full[stage], head, row, part.b);
                load_rows<HEAD_DIM, TILE>(at.douts + place, dout_map, at.dout_full[stage], head, row, part.b);
            } else {
                arrive(at.query_full[stage]);
            }
        }
    for (const int end = step + STAGES; step < end; step++) wait(at.empty[step % STAGES], step / STAGES % 2 ^ 1);
}

// A warp: passes on what warpgroup `group` has added up for dq, in turn. Not `ordered`, only the first and the last keep theirs.
template <int HEAD_DIM>
void pass_dq(const Layout<HEAD_DIM>& at, const Part& part, int group, const unsigned char* memory, bf16* dqkv, float* dq_sum,
             int* turns, const int* start, int length, int heads, int kv_heads, bool ordered, float scale) {
    constexpr int TILE = QUERIES<HEAD_DIM>, BYTES = Layout<HEAD_DIM>::DQ_BYTES;
    const int lane = threadIdx.x % WARP, tiles = (length + TILE - 1) / TILE, width = (heads + 2 * kv_heads) * HEAD_DIM;
    const int rows_from = HEAD_DIM == 64 ? group * 64 : 0, columns_from = HEAD_DIM == 64 ? 0 : group * 64;
    const float4* add = reinterpret_cast<const float4*>(memory + (at.dq - at.keys) + group * BYTES) + lane;
    const float4* before = reinterpret_cast<const float4*>(memory + (at.dq_before - at.keys) + group * BYTES) + lane;
    int step = 0, loads = 0;
    for (int head = part.head; head < part.heads_end; head++)
        for (int tile = part.tile; tile < part.tile + part.tiles; tile++, step++) {
            const long long index = (((long long)part.b * heads + head) * tiles + tile) * GROUPS + group;
            float* sum = dq_sum + index * PART;
            const int turn = (tile * TILE - part.first) / KEYS;  // from the diagonal
            const bool last = start[part.row + tile * TILE] >= part.first;
            if (turn > 0) {
                // All lanes look, so that they stay together; seldom, as those that are waited for use the memory, too.
                const int least = ordered || last ? turn : 1;
                while (__any_sync(ALL_LANES, load_acquire(turns + index) < least)) __nanosleep(PAUSE_NS);
                fence_async_global();  // the copy engine, too, comes after the acquire
                if (last && lane == 0) {
                    arrive_expecting(at.before_full[group], BYTES);
                    load_bytes(at.dq_before + group * BYTES, sum, BYTES, at.before_full[group]);
                }
            }
            wait(at.dq_full[group], step % 2);
            __syncwarp();  // all have seen it: once lane 0 gives dq back, the next phase may end
            if (!last) {
                if (lane == 0) {
                    if (turn > 0)
                        add_floats(sum, at.dq + group * BYTES, BYTES);
                    else
                        store_bytes(sum, at.dq + group * BYTES, BYTES);
                    commit_stores();
                    wait_stores_read();
                    arrive(at.dq_empty[group]);
                    wait_stores();
                    fence_async_global();
                    count_release(turns + index);
                }
                __syncwarp();  // the others would only spin
                continue;
            }
            if (turn > 0) wait(at.before_full[group], loads++ % 2);
            const int query = tile * TILE + rows_from + lane / 4;
            bf16* target = dqkv + (part.row + query) * width + head * HEAD_DIM + columns_from + lane % 4 * 2;
#pragma unroll 1
            for (int warp = 0; warp < WARPGROUP / WARP; warp++)  // the fragments of its lanes
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    float4 value = add[j * WARPGROUP + warp * WARP];
                    if (turn > 0) {
                        const float4 rest = before[j * WARPGROUP + warp * WARP];
                        value = {rest.x + value.x, rest.y + value.y, rest.z + value.z, rest.w + value.w};
                    }
                    const int row = query + warp * 16;
                    unsigned* pair = reinterpret_cast<unsigned*>(target + (long long)warp * 16 * width + j * 8);
                    if (row < length) *pair = pack(value.x * scale, value.y * scale);
                    if (row + 8 < length) pair[4 * width] = pack(value.z * scale, value.w * scale);
                }
            __syncwarp();  // all have read the part
            if (lane == 0) arrive(at.dq_empty[group]);
        }
}
