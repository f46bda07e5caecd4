// Hopper's instructions, one function each: mbarriers, TMA and bulk copies, clusters (sm_90 and later), and
// register reallocation (sm_90a only). Those of wgmma are in wgmma.cuh.
#pragma once

#include "wgmma.cuh"

// CUtensorMap of cuda.h: an array's address and extents,
// and the box of one copy. runtime/tensor_map.py makes it.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// ---- mbarriers. A phase completes when `arrivals` threads have arrived and all expected bytes
// have been copied. A wait names a phase by its parity, and returns at once if that phase is
// complete. A wait for parity 1 on a new mbarrier returns at once. Two phases later the parity is
// the same again. So the next phase must not complete while a thread may still wait for this one.

inline void mbarrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After mbarrier_init: makes it visible to the async proxy. The other threads also need a __syncthreads.
inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

inline void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more bytes.
inline void arrive_expecting(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

inline bool try_wait_parity(unsigned barrier, int parity) {
    int over;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.s32 %0, 1, 0, p;\n}"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
    return over;
}

inline void wait(unsigned barrier, int parity) {
    while (!try_wait_parity(barrier, parity)) {}
}

// An array of mbarriers in shared memory.
struct Barriers {
    unsigned address;

    explicit Barriers(unsigned address) : address(address) {}
    unsigned operator[](int i) const { return address + 8 * i; }
    unsigned end(int count) const { return address + 8 * count; }

    void init(int count, int arrivals) const {
        for (int i = 0; i < count; i++) mbarrier_init(address + 8 * i, arrivals);
    }
};

// Named barrier `id` (1 to 15; __syncthreads uses 0) among `threads` threads, in whole warps.
inline void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at a named barrier without waiting. The arriving threads count among its `threads`.
inline void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- TMA and bulk copies, issued by one thread. Rows past an array's end are read as zeros and not written.

// Proxy fences: make this thread's earlier accesses visible to the async proxy
// (TMA, bulk copies, wgmma). The first covers its writes to shared memory. The second covers global memory,
// and other threads' writes that this thread has acquired.
inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
inline void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Issues the load of the map's box at (d, head, row, batch) into a tile. Its bytes count at the mbarrier.
inline void tma_load(unsigned tile, const TensorMap& map, unsigned barrier, int d, int head, int row,
                     int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(tile),
        "l"(&map), "r"(barrier), "r"(d), "r"(head), "r"(row), "r"(batch)
        : "memory");
}

// Issues the store of a tile to the map's box; bulk_commit must follow.
inline void tma_store(const TensorMap& map, unsigned tile, int d, int head, int row, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5}], [%0];" ::"r"(tile),
        "l"(&map), "r"(d), "r"(head), "r"(row), "r"(batch)
        : "memory");
}

// Issues a load of `bytes` into shared memory. They count at
// the mbarrier. Both addresses and `bytes` are multiples of 16.
inline void bulk_load(unsigned target, const void* source, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// bulk_load with an L2 cache policy, see copies.cuh.
inline void bulk_load_hint(unsigned target, const void* source, int bytes, unsigned barrier,
                           unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// Issues a store from shared to global memory.
inline void bulk_store(float* target, unsigned source, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source),
                 "r"(bytes)
                 : "memory");
}

// Issues an addition of fp32 values from shared memory to those in global memory.
inline void bulk_reduce_add(float* target, unsigned source, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
                 "r"(source), "r"(bytes)
                 : "memory");
}

// Groups of this thread's stores. bulk_wait_read waits until all but the last PENDING groups have read their
// sources, bulk_wait until all groups have been written.
inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING = 0>
void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- clusters: blocks that write to each other's shared memory and arrive at each other's mbarriers.

inline int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

inline void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// Arrives at block `rank`'s mbarrier of the same address. Its release
// has CTA scope: block `rank` must not rely on any write of this thread.
inline void arrive_remote(unsigned barrier, int rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// tma_load with multicast: into the same tile of each block whose bit is set in `ranks`, and to its mbarrier.
inline void tma_load_multicast(int ranks, unsigned tile, const TensorMap& map, unsigned barrier, int d,
                               int head, int row, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(tile),
        "l"(&map), "r"(barrier), "r"(d), "r"(head), "r"(row), "r"(batch), "h"((short)ranks)
        : "memory");
}

// ---- between blocks: a thread that acquires a released value sees all writes made before the release.

inline int load_acquire(const int* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

inline void add_release(int* address) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(address) : "memory");
}

// ---- registers per thread. All warps of a warpgroup call. dealloc returns registers to the
// block's pool, alloc waits until it has enough. The kernel needs __launch_bounds__(threads, 1).

template <int COUNT>
void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
