// Four of the eight bytes of x (0 to 3) and y (4 to 7), one for each digit of `selector`, the last digit's first (PTX ISA, prmt). A digit
// of 8 and more gives the sign of byte (digit - 8), eight times.
__device__ __forceinline__ unsigned permute_bytes(unsigned x, unsigned y, unsigned selector) {
    unsigned result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(selector));
    return result;
}
