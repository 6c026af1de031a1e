// A barrier of `threads` threads that all wait, as named_barrier_sync, and whether `one` is true in one of them.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool one) {
    unsigned count;
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %3, 0;\n"
        "bar.red.popc.u32 %0, %1, %2, p; }"
        : "=r"(count)
        : "r"(id), "r"(threads), "r"((unsigned)one)
        : "memory");
    return count > 0;
}
