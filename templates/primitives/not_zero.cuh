// A mask of the elements of a pair that are not 0: all ones, added to the bits below the sign, carry into it.
__device__ __forceinline__ unsigned not_zero(unsigned packed) {
    return (((packed & 0x7fff7fff) + 0x7fff7fff) >> 15 & 0x00010001) * 0xffff;
}
