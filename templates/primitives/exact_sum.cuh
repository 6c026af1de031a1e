// A sum of fp32 numbers without rounding, in WORDS integers: word i counts units of 2^(24 i - 149), the last one numbers that are
// not finite. Integers may be added in any order: whichever block comes first, the sum has the same bits.
//: Floating-point addition rounds, so its result depends on the order, and atomic additions have none. The usual cure is fixed
//: point: a scale that is large enough for the smallest terms and small enough that nothing overflows, which must be known before.
//: Here every fp32 number has a place: its 24 bits begin at one of 254 positions, so they lie in at most two words of 24 bits
//: (Kulisch's accumulator). A term adds less than 2^24 to a word of 64 bits: 2^39 terms cannot overflow it.
struct ExactTerm {
    int word, low, high;  // the place of the term's 24 bits: what it adds to this word, and to the next one
    __device__ __forceinline__ explicit ExactTerm(float x) {
        const unsigned bits = __float_as_uint(x), exponent = bits >> 23 & 255;
        const bool negative = bits >> 31;
        const int position = exponent == 0 ? 0 : (int)exponent - 1;  // |x| = fraction * 2^(position - 149)
        const long long fraction = (bits & 0x7fffff) | (exponent == 0 ? 0 : 0x800000), shifted = fraction << position % 24;
        word = position / 24, low = (int)(shifted & 0xffffff), high = (int)(shifted >> 24);
        if (negative) low = -low, high = -high;
        if (exponent == 255) word = WORDS - 1, low = x != x || !negative, high = x != x || negative;
    }
    __device__ __forceinline__ void add_to(long long* words) const {
        const auto add = [&](int at, long long by) {
            if (by != 0) atomicAdd((unsigned long long*)words + at, (unsigned long long)by);
        };
        if (word == WORDS - 1) {  // counts +inf in its low half and -inf in its high one; NaN is both
            add(word, low + ((long long)high << 32));
            return;
        }
        add(word, low);
        add(word + 1, high);
    }
};

__device__ __forceinline__ void add_exactly(long long* words, float x) { ExactTerm(x).add_to(words); }

// The sum of the terms of a warp's lanes that add to the same word, exactly, for the first of these lanes; 0 for the others, and
// for lanes without words. All lanes call it.
//: Neighbouring pairs often read the same element, such as the last one of a table of clamped distances, and atomic additions to
//: one address wait for each other. 32 numbers of 24 bits fit an int.
__device__ __forceinline__ ExactTerm together(const long long* words, float x) {
    ExactTerm term(words == nullptr ? 0.0f : x);
    const unsigned lane = threadIdx.x % 32;
    const unsigned alike = __match_any_sync(0xffffffff, words == nullptr ? lane : (unsigned long long)(words + term.word));
    if (alike != 1u << lane) term.low = reduce_add(alike, term.low), term.high = reduce_add(alike, term.high);
    if (__ffs(alike) - 1 != lane) term.low = term.high = 0;
    return term;
}

// The sum, rounded once.
__device__ __forceinline__ float exact_sum(const long long* words) {
    const bool rises = words[WORDS - 1] & 0xffffffff, falls = words[WORDS - 1] >> 32;
    if (rises || falls) return __uint_as_float(rises && falls ? 0x7fc00000 : rises ? 0x7f800000 : 0xff800000);
    double sum = 0.0;
    for (int word = WORDS - 2; word >= 0; --word) sum = sum * 16777216.0 + (double)words[word];  // in units of 2^-149
    return (float)(sum * 0x1p-149);
}
