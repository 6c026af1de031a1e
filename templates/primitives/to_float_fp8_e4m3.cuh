// The exponent has a bit less than that of fp16, whose bias is 8 more: as bits of an fp16 the number is 2^-8 of itself.
__device__ __forceinline__ float to_float(fp8_e4m3 x) {
    float y;
    const unsigned short half = (x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(half));
    return (x.bits & 0x7f) == 0x7f ? __uint_as_float(0x7fffffff) : 256.0f * y;  // the only NaN
}
