// Rounded to nearest, ties to even; a NaN stays a NaN.
__device__ __forceinline__ bf16 to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    const unsigned rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const unsigned quiet_nan = (bits >> 16) | 0x40;
    return bf16{(unsigned short)(x != x ? quiet_nan : rounded)};
}
