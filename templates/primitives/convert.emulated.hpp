// The meaning of cvt between fp32 and the 16-bit types: round to nearest, ties to even (PTX ISA, "cvt").
#pragma once

namespace ptx {

inline float from_half(unsigned short bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    // The product replaces the bias of 127 by that of 15. It is exact.
    const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY) : __uint_as_float((bits & 0x7fff) << 13) * 0x1p112f;
    return bits & 0x8000 ? -magnitude : magnitude;
}

inline unsigned short to_half(float x) {
    const unsigned sign = __float_as_uint(x) >> 16 & 0x8000;
    const float magnitude = fabsf(x);
    if (x != x) return 0x7fff;
    if (magnitude >= 65520.0f) return sign | 0x7c00;                     // rounds to infinity
    if (magnitude < 0x1p-14f) return sign | (unsigned)lrintf(magnitude * 0x1p24f);
    int exponent;
    const float fraction = frexpf(magnitude, &exponent);                  // 0.5 <= fraction < 1
    const unsigned rounded = (unsigned)lrintf(fraction * 0x1p11f);         // 1024 to 2048: the carry goes into the exponent
    return sign | (((exponent + 13) << 10) + rounded);
}

inline float from_bfloat(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

inline unsigned short to_bfloat(float x) {
    if (x != x) return 0x7fff;
    const unsigned bits = __float_as_uint(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline unsigned short from_e4m3(unsigned char bits) {  // as an fp16
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    const float magnitude = exponent ? ldexpf(8.0f + fraction, exponent - 10) : ldexpf((float)fraction, -9);
    return to_half((bits & 127) == 127 ? NAN : bits & 128 ? -magnitude : magnitude);
}

inline void cvt_rn_f16x2_e4m3x2(int, unsigned& d, unsigned short a) {
    d = (unsigned)from_e4m3(a >> 8) << 16 | from_e4m3(a & 255);
}

// To a number of 8 bits with `fraction` bits of fraction, up to `largest`, those below `least` multiples of one.
inline unsigned char to_byte(float x, int fraction, float least, float largest) {
    const unsigned sign = __float_as_uint(x) >> 24 & 0x80;
    const float magnitude = fabsf(x);
    if (x != x) return 0x7f;
    if (magnitude < least) return sign | (unsigned)lrintf(ldexpf(magnitude / least, fraction));
    int exponent, first;
    const float part = frexpf(fminf(magnitude, largest), &exponent);  // 0.5 <= part < 1
    frexpf(least, &first);
    return sign | ((exponent - first << fraction) + (unsigned)lrintf(ldexpf(part, fraction + 1)));
}

inline void cvt_rn_satfinite_e4m3x2_f32(int, unsigned short& d, float high, float low) {
    d = to_byte(high, 3, 0x1p-6f, 448.0f) << 8 | to_byte(low, 3, 0x1p-6f, 448.0f);
}
inline void cvt_rn_satfinite_e5m2x2_f32(int, unsigned short& d, float high, float low) {
    d = to_byte(high, 2, 0x1p-14f, 57344.0f) << 8 | to_byte(low, 2, 0x1p-14f, 57344.0f);
}

inline void cvt_f32_f16(int, float& d, unsigned short a) { d = from_half(a); }
inline void cvt_rn_f16_f32(int, unsigned short& d, float a) { d = to_half(a); }
inline void cvt_rn_bf16_f32(int, unsigned short& d, float a) { d = to_bfloat(a); }
inline void cvt_rn_f16x2_f32(int, unsigned& d, float high, float low) { d = (unsigned)to_half(high) << 16 | to_half(low); }
inline void cvt_rn_bf16x2_f32(int, unsigned& d, float high, float low) { d = (unsigned)to_bfloat(high) << 16 | to_bfloat(low); }

}  // namespace ptx
