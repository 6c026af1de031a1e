// Fragments of 16 steps of a sum, which are one mma; each number x = big + small up to 2^-17 of x, both in bf16. The numbers of a
// pair of steps share a register.
struct SplitA {
    unsigned big[4], small[4];
};
struct SplitB {
    unsigned big[2], small[2];
};
__device__ __forceinline__ void split(float first, float second, unsigned& big, unsigned& small) {
    big = pack(first, second);
    small = pack(first - __uint_as_float(big << 16), second - __uint_as_float(big & 0xffff0000));
}
__device__ __forceinline__ void split_a(SplitA& to, const float (&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) split(x[i / 2][i % 2], x[i / 2][i % 2 + 2], to.big[i], to.small[i]);
}
__device__ __forceinline__ void split_b(SplitB& to, const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) split(x[2 * i], x[2 * i + 1], to.big[i], to.small[i]);
}

// D += A B: all products but small by small, which is 2^-16 of the largest; small terms first ("bf16x3").
//: (A + a)(B + b) = AB + Ab + aB + ab: three mma for the first three, and the last is left out. Small ones are added
//: first, while the sum is small itself.
template <int N> __device__ __forceinline__ void mma_split(float (&d)[4], const SplitA (&a)[N], const SplitB (&b)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        mma_16x8x16(d, d + 2, a[i].small, b[i].big[0], b[i].big[1]);
        mma_16x8x16(d, d + 2, a[i].big, b[i].small[0], b[i].small[1]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) mma_16x8x16(d, d + 2, a[i].big, b[i].big[0], b[i].big[1]);
}
