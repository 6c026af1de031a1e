// Two neighbouring numbers of fp32 as sums of three terms of bf16, the smallest first: each term is the nearest to what the larger
// ones leave. Together they have the 24 bits of fp32, if the number is not below 2^-110: no term is then below what bf16 has.
struct Terms {
    unsigned at[3];  // two numbers each, as pack() joins them
};

// Of numbers that bf16 has no infinity for: 3.39e38, at most.
__device__ __forceinline__ Terms terms_of(float low, float high) {
    const unsigned first = pack(low, high);
    const float low_rest = low - low_of(first), high_rest = high - high_of(first);
    const unsigned second = pack(low_rest, high_rest);
    return {pack(low_rest - low_of(second), high_rest - high_of(second)), second, first};
}

// Of any numbers. Above the largest number of bf16 the first term is what rounding towards 0 leaves. Infinity, as 1 + 0 + infinity,
// and NaN have it in the smallest term, which is multiplied with the largest of another number alone.
//: As a first term, infinity would also be multiplied with smaller terms, which may be 0 or have the other sign: NaN. So it meets
//: the largest term alone, which has the sign of the number, and is 0 if the number is.
__device__ __forceinline__ Terms terms_of_any(float low, float high) {
    const float numbers[2] = {low, high};
    float first[2], second[2], third[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const bool finite = fabsf(numbers[i]) < INF;
        const float x = finite ? numbers[i] : copysignf(1.0f, numbers[i]);
        const bool large = fabsf(x) > 3.3895313892515355e38f;
        first[i] = large ? __uint_as_float(__float_as_uint(x) & 0xffff0000u) : low_of(pack(x, 0.0f));
        second[i] = low_of(pack(x - first[i], 0.0f));
        third[i] = finite ? x - first[i] - second[i] : numbers[i];
    }
    return {pack(third[0], third[1]), pack(second[0], second[1]), pack(first[0], first[1])};
}
