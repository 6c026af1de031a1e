// All bits of each element of a pair that is infinite or NaN: its exponent is all ones, and one more carries into the sign.
__device__ __forceinline__ unsigned not_finite(unsigned packed) {
    return (((packed & 0x7c007c00) + 0x04000400) >> 15 & 0x00010001) * 0xffff;
}
// All bits of each element of a pair that is not 0: all ones, added to what is not the sign, carry into the sign.
__device__ __forceinline__ unsigned not_zero(unsigned packed) {
    return (((packed & 0x7fff7fff) + 0x7fff7fff) >> 15 & 0x00010001) * 0xffff;
}
