// A number in e4m3: rounded to nearest, ties to even; beyond 448 it becomes 448, NaN stays NaN.
__device__ __forceinline__ unsigned quantize_one(float x) {
    const float size = fminf(fabsf(x), 448.0f);
    const unsigned bits = __float_as_uint(size);
    // A small one is a multiple of the smallest of all, which the lowest bits of the sum count
    const unsigned code = size < 0x1p-6f ? __float_as_uint(size + 16384.0f) - __float_as_uint(16384.0f)
                                         : (bits + 0x7ffff + (bits >> 20 & 1) >> 20) - 0x3c0;
    return (x != x ? 0x7f : code) | (__float_as_uint(x) >> 24 & 0x80);
}
__device__ __forceinline__ unsigned short quantize(float low, float high) {
    return quantize_one(low) | quantize_one(high) << 8;
}
