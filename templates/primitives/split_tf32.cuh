// Fragments of 16 steps of a sum, which are two mma; each number x = big + small up to one unit in its last place. Tensor
// cores ignore the last 13 bits, so that half of what those count, added to the bits of x, rounds big; small, what is left,
// needs 11 bits and a sign, and mostly fits. (A NaN may be a zero in big then; it is a NaN in small.)
struct SplitA {
    unsigned big[2][4], small[2][4];
};
struct SplitB {
    unsigned big[2][2], small[2][2];
};
__device__ __forceinline__ void split(float x, unsigned& big, unsigned& small) {
    big = __float_as_uint(x) + 0x1000;
    small = __float_as_uint(x - __uint_as_float(big & 0xffffe000));
}
__device__ __forceinline__ void split_a(SplitA& to, const float (&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) split(x[i / 4][i % 4], to.big[i / 4][i % 4], to.small[i / 4][i % 4]);
}
__device__ __forceinline__ void split_b(SplitB& to, const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) split(x[i], to.big[i / 2][i % 2], to.small[i / 2][i % 2]);
}

// D += A B: all products but small by small, which is 2^-22 of the largest; small terms first ("3xTF32"). Ootomo and Yokota
// 2022, "Recovering single precision accuracy from Tensor Cores".
//: (A + a)(B + b) = AB + Ab + aB + ab: three mma for the first three, and the last is left out. Small ones are added
//: first, while the sum is small itself.
template <int N> __device__ __forceinline__ void mma_split(float (&d)[4], const SplitA (&a)[N], const SplitB (&b)[N]) {
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
        mma_16x8x8(d, d + 2, a[i / 2].small[i % 2], b[i / 2].big[i % 2][0], b[i / 2].big[i % 2][1]);
        mma_16x8x8(d, d + 2, a[i / 2].big[i % 2], b[i / 2].small[i % 2][0], b[i / 2].small[i % 2][1]);
    }
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) mma_16x8x8(d, d + 2, a[i / 2].big[i % 2], b[i / 2].big[i % 2][0], b[i / 2].big[i % 2][1]);
}
