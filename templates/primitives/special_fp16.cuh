// A mask of the elements of a pair that are infinite or NaN: their exponents are all ones, and adding 1 carries into the sign.
__device__ __forceinline__ unsigned not_finite(unsigned packed) {
    return (((packed & 0x7c007c00) + 0x04000400) >> 15 & 0x00010001) * 0xffff;
}
