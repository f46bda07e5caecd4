// The forward pass's third warpgroup, and what it shares with the others: items of work and the places in shared memory.
// attention_hopper.cu says what all this is for.
#pragma once

#include "attention_hopper.cuh"

constexpr int QUERIES = GROUPS * GROUP_ROWS;
static_assert(QUERIES == KEYS, "the own key of each of an item's queries is in the first tile of keys");

// What a block works on: queries of one head of one sequence, and the lowest tile of keys that they see. first < 0: nothing is
// left.
struct Item {
    int first, head, b, lowest;

    int highest(int length) const { return (min(first + QUERIES, length) - 1) / KEYS; }
};

// Item `number` of all.
inline Item item_at(int number, int tiles, int heads, int batch, int section, const int* start, int length) {
    const int begin = number / (section * tiles) * section, within = number - begin * tiles;
    const int size = min(section, batch * heads - begin), pair = begin + within % size;
    const int first = (tiles - 1 - within / size) * QUERIES, b = pair / heads;
    return {first, pair % heads, b, start[(long long)b * length + first] / KEYS};
}

// Addresses in shared memory: queries of two items, results of one, STAGES tiles of keys and of values.
template <int HEAD_DIM, int STAGES>
struct Layout {
    static constexpr int OWN_BYTES = GROUP_ROWS * HEAD_DIM * 2, TILE_BYTES = KEYS * HEAD_DIM * 2;
    unsigned queries, outs, keys, values;
    Barriers query_full, query_empty, key_full, key_empty, value_full, value_empty;
    Item* items;  // two

    explicit Layout(unsigned char* memory)
        : queries(shared_address(memory)), outs(queries + 2 * GROUPS * OWN_BYTES), keys(outs + GROUPS * OWN_BYTES),
          values(keys + STAGES * TILE_BYTES), query_full(values + STAGES * TILE_BYTES), query_empty(query_full.end(2)),
          key_full(query_empty.end(2)), key_empty(key_full.end(STAGES)), value_full(key_empty.end(STAGES)),
          value_empty(value_full.end(STAGES)),
          items(reinterpret_cast<Item*>(memory + (value_empty.end(STAGES) - queries))) {}

    void init() const {
        query_full.init(2, GROUPS);
        query_empty.init(2, GROUPS * WARPGROUP / WARP);
        key_full.init(STAGES, 1);
        key_empty.init(STAGES, GROUPS * WARPGROUP / WARP);
        value_full.init(STAGES, 1);
        value_empty.init(STAGES, GROUPS * WARPGROUP / WARP);
        fence_mbarrier_init();
    }
};

// One thread: takes items and copies what they need, until nothing is left.
template <int HEAD_DIM, int STAGES>
void copy_items(const Layout<HEAD_DIM, STAGES>& at, const TensorMap& qkv_map, const int* start, int* counts, int batch,
                int length, int heads, int kv_heads, int section) {
    const int tiles = (length + QUERIES - 1) / QUERIES, count = tiles * heads * batch;
    unsigned step = 0;  // tiles of keys so far
    for (unsigned round = 0;; round++) {
        const unsigned slot = round % 2;
        const int number = atomicAdd(&counts[0], 1);
        const Item item = number < count ? item_at(number, tiles, heads, batch, section, start, length) : Item{-1, 0, 0, 0};
        wait(at.query_empty[slot], round / 2 % 2 ^ 1);
        at.items[slot] = item;
        if (item.first < 0) {
            for (int g = 0; g < GROUPS; g++) arrive(at.query_full[slot]);
            if (atomicAdd(&counts[1], 1) == gridDim.x - 1) counts[0] = counts[1] = 0;  // all blocks have seen the end
            return;
        }
        for (int g = 0; g < GROUPS; g++)
            load_rows<HEAD_DIM, GROUP_ROWS>(at.queries + (slot * GROUPS + g) * at.OWN_BYTES, qkv_map, at.query_full[slot],
                                            item.head, item.first + g * GROUP_ROWS, item.b);
        const int key_head = heads + item.head / (heads / kv_heads);
        for (int tile = item.highest(length); tile >= item.lowest; tile--, step++) {
            const unsigned stage = step % STAGES, parity = step / STAGES % 2, place = stage * at.TILE_BYTES;
            wait(at.key_empty[stage], parity ^ 1);
            load_rows<HEAD_DIM, KEYS>(at.keys + place, qkv_map, at.key_full[stage], key_head, tile * KEYS, item.b);
            wait(at.value_empty[stage], parity ^ 1);
            load_rows<HEAD_DIM, KEYS>(at.values + place, qkv_map, at.value_full[stage], key_head + kv_heads, tile * KEYS,
                                      item.b);
        }
    }
}
