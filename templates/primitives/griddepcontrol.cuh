// Waits until the kernels before this one have ended and what they wrote is visible. Launched with programmatic stream
// serialization, a kernel may start earlier: it touches no global memory before this.
__device__ __forceinline__ void wait_for_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel may start as soon as all blocks have come here or have ended.
//: Its blocks then already wait when the last block of this kernel ends: the time between two kernels is saved.
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }
