// The two elements that pack() joined, as fp32.
__device__ __forceinline__ float low_of(unsigned packed) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)(packed & 0xffff)));
    return y;
}
__device__ __forceinline__ float high_of(unsigned packed) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)(packed >> 16)));
    return y;
}
