// Fragments of STEPS mma, each number x = big + small up to one unit in its last place. Tensor cores ignore the last 13 bits, so that
// half of what those count, added to the bits of x, rounds big; small, what is left, needs 11 bits and a sign, and mostly fits.
// (A NaN may be a zero in big then; it is a NaN in small.)
template <int STEPS, int N> struct Split {
    unsigned big[STEPS][N], small[STEPS][N];
};
template <int STEPS, int N> __device__ __forceinline__ void split(float x, Split<STEPS, N>& to, int step, int i) {
    to.big[step][i] = __float_as_uint(x) + 0x1000;
    to.small[step][i] = __float_as_uint(x - __uint_as_float(to.big[step][i] & 0xffffe000));
}

// D += A B over STEPS steps: all products but small by small, which is 2^-22 of the largest; small terms first. Ootomo and Yokota
// 2022, "Recovering single precision accuracy from Tensor Cores".
template <int STEPS>
__device__ __forceinline__ void mma_split(float (&d)[4], const Split<STEPS, 4>& a, const Split<STEPS, 2>& b) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        mma_16x8x8(d, a.small[step], b.big[step][0], b.big[step][1]);
        mma_16x8x8(d, a.big[step], b.small[step][0], b.small[step][1]);
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) mma_16x8x8(d, a.big[step], b.big[step][0], b.big[step][1]);
}
