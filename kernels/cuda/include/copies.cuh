// Asynchronous copies from global to shared memory (cp.async, sm_80 and later), and loads from shared memory.
// Shared memory is addressed by 32-bit byte addresses.
#pragma once

inline unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Issue a copy of 16 bytes; both addresses are multiples of 16.
// If not `valid`, zeros are written and `global` is not read.
inline void cp_async(unsigned shared, const void* global, bool valid) {
    const int bytes_read = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes_read)
                 : "memory");
}

// L2 cache policy for data that is read once: its lines are evicted first.
inline unsigned long long evict_first() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// cp_async with an L2 cache policy.
inline void cp_async_hint(unsigned shared, const void* global, bool valid, unsigned long long policy) {
    const int bytes_read = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared),
                 "l"(global), "r"(bytes_read), "l"(policy)
                 : "memory");
}

// cp_async through L1, for when another copy fetches the other half of the 32-byte sector.
inline void cp_async_ca(unsigned shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Issue a copy of 4 bytes.
inline void cp_async_4(unsigned shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// Load four words from shared memory; the address is a multiple of 16.
inline void ld_shared_v4(unsigned (&word)[4], unsigned shared) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(shared)
                 : "memory");
}

// Wait for all copies that this thread has issued. Other threads see the data after the next __syncthreads.
inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Close the current group of copies.
inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most the newest PENDING groups of this thread are still in flight.
template <int PENDING>
void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
