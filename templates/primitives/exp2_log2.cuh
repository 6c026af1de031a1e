// 2^x and log2(x) on the special function unit; a denormal counts as 0. Relative error of 2^x at most 2^-22.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
