// tanh(x), one instruction of the special function unit. Relative error at most 2^-11 (PTX ISA, "tanh").
__device__ __forceinline__ float rough_tanh(float x) {
    float result;
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
