// Two numbers in e4m3, `low` in the lower byte: rounded to nearest, ties to even; beyond 448 they become 448, NaN stays NaN.
__device__ __forceinline__ unsigned short quantize(float low, float high) {
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}
