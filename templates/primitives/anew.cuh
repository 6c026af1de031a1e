// x, of which the compiler forgets how it came about: what was computed from it before need not stay in a register.
__device__ __forceinline__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
