// The two numbers of e4m3 in the lower 16 bits of `two`, as fp16, which has all of them.
__device__ __forceinline__ unsigned halves_of(unsigned two) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)two));
    return halves;
}
