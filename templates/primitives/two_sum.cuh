// a + b as its fp32 rounding and what that leaves out, exactly (Knuth 1969). The rest of what is not finite is 0.
//: An additive mask of -3.4e38 makes scores whose neighbours in fp32 are 2e31 apart: the logarithm of a sum beside one of them
//: is rounded away, unless it is kept by itself.
struct TwoSum {
    float sum, rest;
};
__device__ __forceinline__ TwoSum two_sum(float a, float b) {
    const float sum = a + b, of_b = sum - a;
    const float rest = (a - (sum - of_b)) + (b - of_b);
    return {sum, rest == rest ? rest : 0.0f};
}
