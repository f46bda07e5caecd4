// The producer of attention_hopper.cu, and what it shares with the consumers: work tiles
// and the layout of shared memory. docs/kernels/attention.md describes the design.
#pragma once

#include "attention_hopper.cuh"

constexpr int QUERY_TILE = CONSUMERS * WARPGROUP_ROWS;
static_assert(QUERY_TILE == KEY_TILE, "the diagonal of a work tile's queries lies in its first key tile");

// A tile of queries of one head of one sequence. lowest_key_tile: the lowest key
// tile that they attend to, which comes last. first_query < 0: no work left.
struct WorkTile {
    int first_query, head, b, lowest_key_tile;

    int highest_key_tile(int length) const { return (min(first_query + QUERY_TILE, length) - 1) / KEY_TILE; }
};

// Work tile `number` of a longest-first schedule. It runs through the (batch, head) pairs in
// sections of `section` pairs. In a section the last query tile of all pairs comes first.
inline WorkTile work_tile_at(int number, int tiles, int heads, int batch, int section, const int* start,
                             int length) {
    const int begin = number / (section * tiles) * section, within = number - begin * tiles;
    const int size = min(section, batch * heads - begin), pair = begin + within % size;
    const int first = (tiles - 1 - within / size) * QUERY_TILE, b = pair / heads;
    return {first, pair % heads, b, start[(long long)b * length + first] / KEY_TILE};
}

// Byte addresses in shared memory: two buffers of q, one of `out`, STAGES each of k and v.
template <int HEAD_DIM, int STAGES>
struct SmemLayout {
    static constexpr int WARPGROUP_BYTES = WARPGROUP_ROWS * HEAD_DIM * 2;
    static constexpr int TILE_BYTES = KEY_TILE * HEAD_DIM * 2;
    unsigned q, out, k, v;
    Barriers q_full, q_empty, k_full, k_empty, v_full, v_empty;
    WorkTile* work_tiles;  // two

    explicit SmemLayout(unsigned char* base)
        : q(shared_address(base)), out(q + 2 * CONSUMERS * WARPGROUP_BYTES),
          k(out + CONSUMERS * WARPGROUP_BYTES), v(k + STAGES * TILE_BYTES), q_full(v + STAGES * TILE_BYTES),
          q_empty(q_full.end(2)), k_full(q_empty.end(2)), k_empty(k_full.end(STAGES)),
          v_full(k_empty.end(STAGES)), v_empty(v_full.end(STAGES)),
          work_tiles(reinterpret_cast<WorkTile*>(base + (v_empty.end(STAGES) - q))) {}

    void init() const {
        q_full.init(2, CONSUMERS);
        q_empty.init(2, CONSUMERS * WARPGROUP / WARP);
        k_full.init(STAGES, 1);
        k_empty.init(STAGES, CONSUMERS * WARPGROUP / WARP);
        v_full.init(STAGES, 1);
        v_empty.init(STAGES, CONSUMERS * WARPGROUP / WARP);
        fence_mbarrier_init();
    }
};

// A thread's state of its warpgroup's part of a work tile: queries
// first_row .. first_row + 63. The lane has rows `row` and row + 8.
struct TileState {
    WorkTile work;
    int first_row, row;
    int doc_begin[2], last_doc_begin;  // start of the lane's rows, and of the warpgroup's last row
    int key_tile;                      // whose S is next
    unsigned long long q_desc;
    float row_max[2], row_sum[2];  // see update_row_max; sums of the lane's own columns

    void init(const WorkTile& work, int warpgroup, unsigned long long q_desc, const int* start, int length) {
        this->work = work;
        this->q_desc = q_desc;
        first_row = work.first_query + warpgroup * WARPGROUP_ROWS;
        row = first_row + threadIdx.x % WARPGROUP / WARP * 16 + threadIdx.x % WARP / 4;
        const int* starts = start + (long long)work.b * length;
        doc_begin[0] = starts[min(row, length - 1)];
        doc_begin[1] = starts[min(row + 8, length - 1)];
        last_doc_begin = starts[min(first_row + WARPGROUP_ROWS, length) - 1];
        key_tile = work.highest_key_tile(length);
        row_max[0] = row_max[1] = minus_infinity();
        row_sum[0] = row_sum[1] = 0;
    }

    // Whether some row of the warpgroup does not attend to some key of the tile.
    bool needs_mask() const {
        return key_tile * KEY_TILE + KEY_TILE - 1 > first_row || key_tile * KEY_TILE < last_doc_begin;
    }
};

// Producer thread: fetches work tiles and loads q, k and v until no work is left.
template <int HEAD_DIM, int STAGES>
void producer(const SmemLayout<HEAD_DIM, STAGES>& smem, const TensorMap& qkv_map, const int* start,
              int* counts, int batch, int length, int heads, int kv_heads, int section) {
    const int tiles = (length + QUERY_TILE - 1) / QUERY_TILE, count = tiles * heads * batch;
    unsigned step = 0;  // counts key tiles of all work tiles
    for (unsigned work_iter = 0;; work_iter++) {
        const unsigned slot = work_iter % 2;
        const int number = atomicAdd(&counts[0], 1);
        const WorkTile work = number < count
                                  ? work_tile_at(number, tiles, heads, batch, section, start, length)
                                  : WorkTile{-1, 0, 0, 0};
        wait(smem.q_empty[slot], work_iter / 2 % 2 ^ 1);
        smem.work_tiles[slot] = work;
        if (work.first_query < 0) {
            for (int g = 0; g < CONSUMERS; g++) arrive(smem.q_full[slot]);
            // Every block has fetched its last work tile: the counters are zero for the next launch.
            if (atomicAdd(&counts[1], 1) == gridDim.x - 1) counts[0] = counts[1] = 0;
            return;
        }
        for (int g = 0; g < CONSUMERS; g++)
            tma_load_rows<HEAD_DIM, WARPGROUP_ROWS>(smem.q + (slot * CONSUMERS + g) * smem.WARPGROUP_BYTES,
                                                    qkv_map, smem.q_full[slot], work.head,
                                                    work.first_query + g * WARPGROUP_ROWS, work.b);
        const int k_head = heads + work.head / (heads / kv_heads);
        for (int tile = work.highest_key_tile(length); tile >= work.lowest_key_tile; tile--, step++) {
            const unsigned stage = step % STAGES, parity = step / STAGES % 2;
            const unsigned offset = stage * smem.TILE_BYTES;
            wait(smem.k_empty[stage], parity ^ 1);
            tma_load_rows<HEAD_DIM, KEY_TILE>(smem.k + offset, qkv_map, smem.k_full[stage], k_head,
                                              tile * KEY_TILE, work.b);
            wait(smem.v_empty[stage], parity ^ 1);
            tma_load_rows<HEAD_DIM, KEY_TILE>(smem.v + offset, qkv_map, smem.v_full[stage], k_head + kv_heads,
                                              tile * KEY_TILE, work.b);
        }
    }
}
