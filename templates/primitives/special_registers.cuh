// threadIdx.x, read again at each call: what was computed from an earlier call need not stay in a register.
//: A register that holds the thread's row throughout the loop is not available for sums. Reading the special register takes a
//: few clocks at each use; asm volatile keeps the compiler from reading it once for all uses.
__device__ __forceinline__ unsigned thread_index() {
    unsigned index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}
