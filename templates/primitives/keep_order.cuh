// What comes before stays before what follows: a barrier of the warp, across which ptxas moves no memory operation. Additions
// that nobody waits for would otherwise gather in front of the products between which they are written.
__device__ __forceinline__ void keep_order() { asm volatile("bar.warp.sync %0;" ::"n"(0xffffffff) : "memory"); }
