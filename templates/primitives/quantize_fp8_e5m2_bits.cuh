// A number in e5m2: rounded to nearest, ties to even; beyond 57344 it becomes 57344, NaN stays NaN.
__device__ __forceinline__ unsigned quantize_one(float x) {
    const float size = fminf(fabsf(x), 57344.0f);
    const unsigned bits = __float_as_uint(size);
    // A small one is a multiple of the smallest of all, which the lowest bits of the sum count
    const unsigned code = size < 0x1p-14f ? __float_as_uint(size + 128.0f) - __float_as_uint(128.0f)
                                         : (bits + 0xfffff + (bits >> 21 & 1) >> 21) - 0x1c0;
    return (x != x ? 0x7f : code) | (__float_as_uint(x) >> 24 & 0x80);
}
__device__ __forceinline__ unsigned short quantize(float low, float high) {
    return quantize_one(low) | quantize_one(high) << 8;
}
