// 2^x on the special function unit; a denormal counts as 0. Relative error at most 2^-22 (PTX ISA, ex2.approx).
//: The unit gives 16 results a clock and multiprocessor. expf() is this instruction too, with several others for large x and for
//: denormal results, both of which belong to negligible weights.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
