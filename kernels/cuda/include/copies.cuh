// Asynchronous copies from global to shared memory, of sm_80 and later, and loads from it. Shared memory is addressed by 32-bit
// byte addresses.
#pragma once

inline unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// Start to copy 16 bytes, of which both addresses are multiples; zeros, and `global` is not read, where not `valid`.
inline void cp_async(unsigned shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
}

// A policy for what is read once: the second-level cache gives it up before anything else.
inline unsigned long long evict_first() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// cp_async with such a policy.
inline void cp_async_hint(unsigned shared, const void* global, bool valid, unsigned long long policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0),
                 "l"(policy)
                 : "memory");
}

// cp_async by way of the first-level cache: where another copy takes the rest of the 32 bytes that memory gives at once.
inline void cp_async_ca(unsigned shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Start to copy 4 bytes.
inline void cp_async_4(unsigned shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// Four words of shared memory, at a multiple of 16 bytes.
inline void ld_shared_v4(unsigned (&word)[4], unsigned shared) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(shared)
                 : "memory");
}

// Wait for all copies that this thread has started; other threads see them after the next __syncthreads.
inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The same in groups: a commit ends one, and a wait lasts until all but the last PENDING groups of this thread are there.
inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
