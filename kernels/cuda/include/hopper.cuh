// What Hopper adds, one function an instruction: the copy engine (TMA) and barriers in shared memory that count bytes, of sm_90 and
// later; products of a whole warpgroup (wgmma) and registers handed from one warpgroup to another, of sm_90a alone.
//
// A warpgroup is 4 warps, the first of which has a number that 4 divides. Shared memory is addressed by 32-bit byte addresses.
//
// Tiles: rows of 64 bf16, 128 bytes, the first at a multiple of 1024. The copy engine stores the 16-byte chunk c of row r in the
// place of chunk c ^ (r % 8) ("128-byte swizzle"), so that 8 rows of one column lie in different banks; wgmma reads it so. Wider
// rows are several tiles.
//
// Products: sum (64 x N) += a (64 x 16) b (16 x N) of bf16, fp32 sums. Fragments are those of mma.cuh, of 64 rows: warp w of the
// warpgroup holds rows 16 w .., and sum[4 j + e] is row g (+ 8 from e = 2 on), column 8 j + 2 t (+ 1 where e is odd). A factor
// in shared memory is a descriptor of its tile; "rows of k": the tile's rows go along k (else a row is one row of a, or one
// column of b). A product runs on while the threads do: from the call until wgmma_wait says so its registers and tiles
// belong to it. warpgroup_fence_operand() keeps the compiler from reading a sum earlier than the wait before it.
#pragma once

#include "mma.cuh"

constexpr int WARPGROUP = 4 * WARP;
constexpr int TILE_ROW_BYTES = 128, TILE_COLUMNS = TILE_ROW_BYTES / 2;

// CUtensorMap of cuda.h: where an array lies, its extents, and the box that is copied at a time. kernels/cuda/tensor_map.py.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// The warp's number in its block, of which the compiler knows that it is the same in all lanes: what follows from it, as addresses
// of tiles, goes to registers that a warp has once.
inline int warp_number() { return __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0); }

// ---- barriers in shared memory. A phase ends when `arrivals` threads have arrived and all expected bytes are there; waiting
// for a phase by its parity returns at once if that phase is over. Waiting on a new barrier for parity 1 returns at once.
// Two phases later the parity is the same again: nobody may let the next phase end while others still wait for this one.

inline void mbarrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After mbarrier_init: the copy engine, too, sees it. A __syncthreads must follow for the other threads.
inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

inline void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and let the phase last until `bytes` more have been copied.
inline void arrive_expecting(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

inline bool try_wait_parity(unsigned barrier, int parity) {
    int over;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.s32 %0, 1, 0, p;\n}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return over;
}

inline void wait(unsigned barrier, int parity) {
    while (!try_wait_parity(barrier, parity)) {}
}

// Barriers side by side in shared memory.
struct Barriers {
    unsigned address;

    explicit Barriers(unsigned address) : address(address) {}
    unsigned operator[](int i) const { return address + 8 * i; }
    unsigned end(int count) const { return address + 8 * count; }

    void init(int count, int arrivals) const {
        for (int i = 0; i < count; i++) mbarrier_init(address + 8 * i, arrivals);
    }
};

// Hardware barrier `id` (1 to 15; 0 is __syncthreads') among `threads` threads of whole warps.
inline void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// The same for threads that others wait for, but that need not wait.
inline void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- the copy engine. One thread calls; rows past an array's end are read as zeros and not written.

// What this thread wrote to shared memory is there for the copy engine and for wgmma, which read it by another way; and what it
// wrote, or has seen written, in the GPU's memory.
inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
inline void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Start to copy a box of map (d, head, row, batch) to a tile; its bytes count at the barrier.
inline void tma_load(unsigned tile, const TensorMap& map, unsigned barrier, int d, int head, int row, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            tile),
        "l"(&map), "r"(barrier), "r"(d), "r"(head), "r"(row), "r"(batch)
        : "memory");
}

inline void tma_store(const TensorMap& map, unsigned tile, int d, int head, int row, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5}], [%0];" ::"r"(tile), "l"(&map),
                 "r"(d), "r"(head), "r"(row), "r"(batch)
                 : "memory");
}

// Start to copy `bytes`, of which 16 divides all three, to shared memory, where they count at the barrier.
inline void bulk_load(unsigned target, const void* source, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The same by a policy of the second-level cache, see copies.cuh.
inline void bulk_load_hint(unsigned target, const void* source, int bytes, unsigned barrier, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// The reverse; or to add them there as floats.
inline void bulk_store(float* target, unsigned source, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes) : "memory");
}

inline void bulk_reduce_add(float* target, unsigned source, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target), "r"(source),
                 "r"(bytes)
                 : "memory");
}

// The stores that this thread started: the sources of all but the last PENDING groups have been read, or all has been written.
inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING = 0>
void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- clusters: blocks on neighbouring multiprocessors that write to each other's shared memory and arrive at its barriers.

inline int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

inline void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrive at the barrier that lies in the same place of block `rank`; of what this thread wrote, that block is told nothing.
inline void arrive_remote(unsigned barrier, int rank) {
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(rank)
                 : "memory");
}

// Start to copy a box of map to the same tile of each block whose bit is set in `ranks`; its bytes count at their barriers.
inline void tma_load_multicast(int ranks, unsigned tile, const TensorMap& map, unsigned barrier, int d, int head, int row, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(tile),
        "l"(&map), "r"(barrier), "r"(d), "r"(head), "r"(row), "r"(batch), "h"((short)ranks)
        : "memory");
}

// ---- between blocks: what was written before a release is seen by whom an acquire has shown its value.

inline int load_acquire(const int* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

inline void add_release(int* address) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(address) : "memory");
}

// ---- registers: each warp of a warpgroup gives some up, or waits for more. The kernel needs __launch_bounds__(threads, 1).

template <int COUNT>
void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Warp: four 8 x 8 matrices to shared memory, the counterpart of ldmatrix_x4.
inline void stmatrix_x4(unsigned row, const unsigned (&value)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(value[0]), "r"(value[1]),
                 "r"(value[2]), "r"(value[3])
                 : "memory");
}

// Elements 8 k .. 8 k + 7 of a sum, rounded: columns 16 k .. of its rows as a left factor, and as store_fragment takes them.
template <int COUNT>
void round_fragment(unsigned (&a)[4], const float (&sum)[COUNT], int k) {
#pragma unroll
    for (int e = 0; e < 4; e++) a[e] = pack(sum[8 * k + 2 * e], sum[8 * k + 2 * e + 1]);
}

// Warpgroup: the fragment's 64 rows go to columns 16 k .. (k < 4) of a tile's rows. `rows`: those rows' address, of which 1024 is
// a divisor.
inline void store_fragment(unsigned rows, int k, const unsigned (&a)[4]) {
    const unsigned lane = threadIdx.x % WARP, row = threadIdx.x % WARPGROUP / WARP * 16 + lane % 16;
    stmatrix_x4(rows + row * TILE_ROW_BYTES + ((2 * k + lane / 16) ^ lane % 8) * 16, a);
}

// ---- products of a warpgroup.

// A tile as wgmma wants it: address, 1024 bytes from 8 rows to the next 8, 128-byte swizzle (PTX ISA, "matrix descriptor").
// `leading_byte_offset`: bytes to the next tile, of a factor that is wider than a tile along its rows, where those do not go along k.
inline unsigned long long tile_descriptor(unsigned tile, unsigned leading_byte_offset = 16) {
    return (tile & 0x3ffff) >> 4 | (unsigned long long)(leading_byte_offset >> 4) << 16 | 1024ull >> 4 << 32 | 1ull << 62;
}

// The same tile from `bytes` on. Along a row: 32 bytes are 16 columns. Along the rows: 2048 bytes are 16 of them.
inline unsigned long long advance(unsigned long long descriptor, int bytes) { return descriptor + (bytes >> 4); }

// Before the first product: registers written by now are there for it.
inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// The same groups as those of copies: a commit ends one, a wait lasts until all but the last PENDING are done.
inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int COUNT>
void warpgroup_fence_operand(float (&sum)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

// sum (64 x 192) = or += a b, both factors in shared memory. A_MN_MAJOR, B_MN_MAJOR: see above.
template <bool A_MN_MAJOR = false, bool B_MN_MAJOR = false>
void wgmma_ss(float (&d)[96], unsigned long long a, unsigned long long b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
        "%96, %97, add, 1, 1, %99, %100;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
        : "l"(a), "l"(b), "r"((int)add), "n"((int)A_MN_MAJOR), "n"((int)B_MN_MAJOR));
}

// sum (64 x 128) = or += a b, both factors in shared memory. A_MN_MAJOR, B_MN_MAJOR: see above.
template <bool A_MN_MAJOR = false, bool B_MN_MAJOR = false>
void wgmma_ss(float (&d)[64], unsigned long long a, unsigned long long b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, add, 1, 1, %67, %68;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"((int)add), "n"((int)A_MN_MAJOR), "n"((int)B_MN_MAJOR));
}

// sum (64 x 64) = or += a b, both factors in shared memory. A_MN_MAJOR, B_MN_MAJOR: see above.
template <bool A_MN_MAJOR = false, bool B_MN_MAJOR = false>
void wgmma_ss(float (&d)[32], unsigned long long a, unsigned long long b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, add, 1, 1, %35, %36;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"((int)add), "n"((int)A_MN_MAJOR), "n"((int)B_MN_MAJOR));
}

// sum (64 x 64) += a b, a in registers, b a tile whose rows go along k.
inline void wgmma_rs(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
