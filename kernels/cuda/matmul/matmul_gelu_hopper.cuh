// Sizes, shared memory layout and tile scheduler of matmul_gelu_hopper.cu.
#pragma once

#include "activation.cuh"
#include "hopper.cuh"

// TILE_N is a template argument, 192 or 128. At 32768 x 3072 x 768, 192 takes 235 us instead of 257
// (forward) and 270 instead of 279 (backward). Without clusters both directions are 2 % slower. TILE_M and
// TILE_K: not tuned.
constexpr int TILE_M = 128, TILE_K = 64, CONSUMERS = 2, CLUSTER = 2;
constexpr int BOX = 64, BOX_BYTES = BOX * TILE_ROW_BYTES;  // a TMA box: 64 x 64 bf16, a tile of hopper.cuh
constexpr int M_TILES = TILE_M / BOX;                      // wgmma tiles of 64 rows
constexpr int EPILOGUE_BUFFERS = 4;                        // boxes per consumer warpgroup
// Named barriers, one of each kind per consumer warpgroup: among its own threads; to begin its main loop.
constexpr int WARPGROUP_BARRIER = 1, ORDER_BARRIER = WARPGROUP_BARRIER + CONSUMERS;

// Addresses in shared memory.
template <int TILE_N>
struct SharedMemory {
    static constexpr int N_TILES = TILE_N / BOX, STAGE_BYTES = (M_TILES + N_TILES) * BOX_BYTES;
    static constexpr int STAGES = TILE_N == 128 ? 5 : 4;  // as many as fit beside the epilogue buffers
    unsigned operands;  // STAGES x (boxes of a, boxes of b)
    unsigned epilogue;  // CONSUMERS x EPILOGUE_BUFFERS boxes
    // full: the stage's operands have arrived. empty: both blocks have read the stage. up_full: a box of up
    // has arrived in an epilogue buffer (backward).
    Barriers full, empty, up_full;

    explicit SharedMemory(const unsigned char* memory)
        : operands(shared_address(memory)), epilogue(operands + STAGES * STAGE_BYTES),
          full(epilogue + CONSUMERS * EPILOGUE_BUFFERS * BOX_BYTES), empty(full.end(STAGES)),
          up_full(empty.end(STAGES)) {}

    void init() const {
        full.init(STAGES, 1);
        empty.init(STAGES, CLUSTER * WARPGROUP / WARP);
        up_full.init(CONSUMERS * EPILOGUE_BUFFERS, 1);
        fence_mbarrier_init();
    }
};

// Tile scheduler. A cluster's work item is CLUSTER tiles side by side; rank r computes the r-th.
template <int TILE_N>
struct Tiles {
    int across, count, next, stride;
    int row, column;  // of the current tile

    Tiles(int m, int n)
        : across((n + CLUSTER * TILE_N - 1) / (CLUSTER * TILE_N)), count((m + TILE_M - 1) / TILE_M * across),
          next(blockIdx.x / CLUSTER), stride(gridDim.x / CLUSTER) {}

    bool has_next() const { return next < count; }

    // Advance to the next tile; false if there is none.
    bool advance() {
        row = next / across * TILE_M;
        column = (next % across * CLUSTER + cluster_rank()) * TILE_N;
        const bool valid = has_next();
        next += stride;
        return valid;
    }
};
