// Adds a number to one in global memory. Any number of threads may add to the same place; the order of their additions is not
// fixed, and so neither are the last bits of the sum.
//: A reduction, not an atomic operation with a result: the thread continues immediately, and L2 adds.
__device__ __forceinline__ void global_add_one(float* to, float a) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(a) : "memory");
}
