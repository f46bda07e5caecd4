// The start of a kernel while the one before it in the stream still runs (programmatic dependent launch, sm_90 and later): launched
// so (Kernel.dependent_launch), a kernel's blocks may begin as soon as all blocks of the one before have called
// launch_dependents or ended. What other kernels write may be touched only after grid_dependency_wait, by which they have ended and their
// writes are seen; a kernel that is launched early must call it. Elsewhere, and launched otherwise, both do nothing.
#pragma once

inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

inline void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
