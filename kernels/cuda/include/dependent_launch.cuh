// The start of a kernel while the one before it in the stream still runs (programmatic dependent launch, sm_90 and later): launched
// so (Kernel.dependent_launch), a kernel's blocks may begin as soon as all blocks of the one before have called
// let_next_start or ended. What other kernels write may be touched only after wait_for_previous, by which they have ended and their
// writes are seen; a kernel that is launched early must call it. Elsewhere, and launched otherwise, both do nothing.
#pragma once

inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
