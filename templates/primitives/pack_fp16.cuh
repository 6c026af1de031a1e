// Two neighbouring elements of a fragment in one register, `low` in the lower half.
//: One instruction rounds two numbers and puts them where mma expects them: a register holds two 16-bit elements of a row.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
