// Programmatic dependent launch (PDL), sm_90 and later: a kernel starts while the previous one on the stream
// still runs.
//
// A kernel launched this way (Kernel.dependent_launch) may start once every block of the previous kernel has
// called launch_dependents or has exited. It must call grid_dependency_wait before it touches what other
// kernels write: the call returns when the previous kernel has ended and its writes are visible.
//
// Both functions do nothing before sm_90. In a kernel launched otherwise, grid_dependency_wait returns at
// once; launch_dependents matters only if the next kernel is launched this way.
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
