// The meaning of mma.sync.m16n8k16 with 16-bit operands (PTX ISA, "Matrix fragments for mma.m16n8k16"): D = A B + C, products exact,
// sums in fp32.
#pragma once

#include "convert.emulated.hpp"

namespace ptx {

struct MmaIn { unsigned a[4], b[2]; float c[4]; };
struct MmaOut { float d[4]; };

// no_sanitize: what a Combine touches is not checked, so the compiler need not call the checks.
template <float (*TO_FLOAT)(unsigned short)> __attribute__((no_sanitize("thread"))) void multiply_fragments(emulator::Lane (&lanes)[32], int) {
    float a[16][16], b[16][8];
    for (int l = 0; l < 32; ++l) {
        const MmaIn& in = *(const MmaIn*)lanes[l].in;
        for (int i = 0; i < 4; ++i)
            for (int e = 0; e < 2; ++e) a[l / 4 + 8 * (i % 2)][l % 4 * 2 + e + 8 * (i / 2)] = TO_FLOAT(in.a[i] >> 16 * e & 0xffff);
        for (int i = 0; i < 2; ++i)
            for (int e = 0; e < 2; ++e) b[l % 4 * 2 + e + 8 * i][l / 4] = TO_FLOAT(in.b[i] >> 16 * e & 0xffff);
    }
    float product[16][8];
    emulator::multiply_16x8x16(a, b, product);
    for (int l = 0; l < 32; ++l) {
        const MmaIn& in = *(const MmaIn*)lanes[l].in;
        for (int i = 0; i < 4; ++i) ((MmaOut*)lanes[l].out)->d[i] = in.c[i] + product[l / 4 + 8 * (i / 2)][l % 4 * 2 + i % 2];
    }
}

template <float (*TO_FLOAT)(unsigned short)>
void mma_16x8x16(int line, float& d0, float& d1, float& d2, float& d3, const MmaIn& in) {
    MmaOut out;
    emulator::warp_collective("mma", line, 0xffffffffu, &in, &out, multiply_fragments<TO_FLOAT>);
    d0 = out.d[0], d1 = out.d[1], d2 = out.d[2], d3 = out.d[3];
}

#define MMA(name, to_float)                                                                                                           \
    inline void name(int line, float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, \
                     unsigned b1, float c0, float c1, float c2, float c3) {                                                             \
        mma_16x8x16<to_float>(line, d0, d1, d2, d3, MmaIn{{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}});                                \
    }
MMA(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, from_half)
MMA(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, from_bfloat)
#undef MMA

// mma.sync.m16n8k8 with tf32 operands (PTX ISA, "Matrix fragments for mma.m16n8k8"): fp32 without its last 13 bits
struct MmaTf32In { unsigned a[4], b[2]; float c[4]; };

__attribute__((no_sanitize("thread"))) inline void multiply_tf32_fragments(emulator::Lane (&lanes)[32], int) {
    const auto value = [](unsigned bits) { return __uint_as_float(bits & 0xffffe000); };
    float a[16][8], b[8][8];
    for (int l = 0; l < 32; ++l) {
        const MmaTf32In& in = *(const MmaTf32In*)lanes[l].in;
        for (int i = 0; i < 4; ++i) a[l / 4 + 8 * (i % 2)][l % 4 + 4 * (i / 2)] = value(in.a[i]);
        for (int i = 0; i < 2; ++i) b[l % 4 + 4 * i][l / 4] = value(in.b[i]);
    }
    for (int l = 0; l < 32; ++l) {
        const MmaTf32In& in = *(const MmaTf32In*)lanes[l].in;
        for (int i = 0; i < 4; ++i) {
            const int row = l / 4 + 8 * (i / 2), column = l % 4 * 2 + i % 2;
            double sum = in.c[i];
            for (int k = 0; k < 8; ++k) sum += (double)a[row][k] * b[k][column];
            ((MmaOut*)lanes[l].out)->d[i] = (float)sum;
        }
    }
}

inline void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(int line, float& d0, float& d1, float& d2, float& d3, unsigned a0,
                                                              unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, float c0,
                                                              float c1, float c2, float c3) {
    MmaTf32In in{{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};
    MmaOut out;
    emulator::warp_collective("mma", line, 0xffffffffu, &in, &out, multiply_tf32_fragments);
    d0 = out.d[0], d1 = out.d[1], d2 = out.d[2], d3 = out.d[3];
}

}  // namespace ptx
