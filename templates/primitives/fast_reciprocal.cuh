// 1 / x on the special function unit: within 1 in the last place (PTX ISA, rcp.approx); x must not be denormal.
//: A division in C is this instruction and a dozen others for IEEE rounding.
__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
