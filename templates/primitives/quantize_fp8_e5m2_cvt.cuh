// Two numbers in e5m2, `low` in the lower byte: rounded to nearest, ties to even; beyond 57344 they become 57344, NaN stays NaN.
__device__ __forceinline__ unsigned short quantize(float low, float high) {
    unsigned short both;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}
