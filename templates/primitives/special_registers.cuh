// threadIdx.x, read again at each call: what was computed from an earlier call need not stay in a register.
//: A register that holds the thread's row all through the loop is one less for sums. The special register costs a few
//: clocks where it is needed, and asm volatile keeps the compiler from reading it once for all.
__device__ __forceinline__ unsigned thread_index() {
    unsigned index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}
