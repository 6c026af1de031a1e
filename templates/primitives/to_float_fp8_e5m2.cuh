__device__ __forceinline__ float to_float(fp8_e5m2 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)(x.bits << 8)));
    return y;
}
