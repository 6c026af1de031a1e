// Adds four numbers to four consecutive ones in global memory, at a multiple of 16 bytes. Any number of threads may add to the
// same place; the order of their additions is not fixed, and so neither are the last bits of the sum.
//: A reduction, not an atomic operation with a result: the thread continues immediately, and L2 adds.
__device__ __forceinline__ void global_add(float* to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], { %1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}
