// A sum of fp32 numbers without rounding, in WORDS integers: word i counts units of 2^(24 i - 149), the last one numbers that are
// not finite. Integers may be added in any order: whichever block comes first, the sum has the same bits.
//: Floating-point addition rounds, so its result depends on the order, and atomic additions have none. The usual cure is fixed
//: point: a scale that is large enough for the smallest terms and small enough that nothing overflows, which must be known before.
//: Here every fp32 number has a place: its 24 bits begin at one of 254 positions, so they lie in at most two words of 24 bits
//: (Kulisch's accumulator). A term adds less than 2^24 to a word of 64 bits: 2^39 terms cannot overflow it.
__device__ __forceinline__ void add_exactly(long long* words, float x) {
    const unsigned bits = __float_as_uint(x), exponent = bits >> 23 & 255;
    const bool negative = bits >> 31;
    const auto add = [&](int word, long long by) { atomicAdd((unsigned long long*)words + word, (unsigned long long)by); };
    if (exponent == 255) {  // counts +inf in the low half and -inf in the high one; NaN is both
        add(WORDS - 1, x != x ? 1LL + (1LL << 32) : negative ? 1LL << 32 : 1LL);
        return;
    }
    const long long fraction = (bits & 0x7fffff) | (exponent == 0 ? 0 : 0x800000);
    const int position = exponent == 0 ? 0 : (int)exponent - 1;  // |x| = fraction * 2^(position - 149)
    const long long shifted = fraction << position % 24, low = shifted & 0xffffff, high = shifted >> 24;
    if (low != 0) add(position / 24, negative ? -low : low);
    if (high != 0) add(position / 24 + 1, negative ? -high : high);
}

// The sum, rounded once.
__device__ __forceinline__ float exact_sum(const long long* words) {
    const bool rises = words[WORDS - 1] & 0xffffffff, falls = words[WORDS - 1] >> 32;
    if (rises || falls) return __uint_as_float(rises && falls ? 0x7fc00000 : rises ? 0x7f800000 : 0xff800000);
    double sum = 0.0;
    for (int word = WORDS - 2; word >= 0; --word) sum = sum * 16777216.0 + (double)words[word];  // in units of 2^-149
    return (float)(sum * 0x1p-149);
}
