// log2(x) on the special function unit; absolute error at most 2^-22 for x in [0.5, 2], relative beyond (PTX ISA, lg2.approx).
__device__ __forceinline__ float fast_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
