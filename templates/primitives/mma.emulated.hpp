// The meaning of mma.sync.m16n8k16 with 16-bit operands and of mma.sync.m16n8k8 with tf32 operands (PTX ISA, "Matrix fragments for
// mma.m16n8k16" and "mma.m16n8k8"): D = A B + C, products exact, sums in fp32. A register holds two operands of 16 bits or one tf32.
#pragma once

#include "convert.emulated.hpp"

namespace ptx {

struct MmaIn { unsigned a[4], b[2]; float c[4]; };
struct MmaOut { float d[4]; };

// Operand e of a register.
inline float half_of(unsigned bits, int e) { return from_half(bits >> 16 * e & 0xffff); }
inline float bfloat_of(unsigned bits, int e) { return from_bfloat(bits >> 16 * e & 0xffff); }
inline float tf32_of(unsigned bits, int) { return __uint_as_float(bits & 0xffffe000); }  // fp32 without its last 13 bits

// no_sanitize: what a Combine touches is not checked, so the compiler need not call the checks.
template <int OPERANDS, float (*OPERAND)(unsigned, int)>
__attribute__((no_sanitize("thread"))) void multiply_fragments(emulator::Lane (&lanes)[32], int) {
    float a[16][16] = {}, b[16][8] = {};
    for (int l = 0; l < 32; ++l) {
        const MmaIn& in = *(const MmaIn*)lanes[l].in;
        for (int e = 0; e < OPERANDS; ++e) {
            const int k = l % 4 * OPERANDS + e;
            for (int i = 0; i < 4; ++i) a[l / 4 + 8 * (i % 2)][k + 4 * OPERANDS * (i / 2)] = OPERAND(in.a[i], e);
            for (int i = 0; i < 2; ++i) b[k + 4 * OPERANDS * i][l / 4] = OPERAND(in.b[i], e);
        }
    }
    float product[16][8];
    emulator::multiply_16x8x16(a, b, product);
    for (int l = 0; l < 32; ++l) {
        const MmaIn& in = *(const MmaIn*)lanes[l].in;
        for (int i = 0; i < 4; ++i) ((MmaOut*)lanes[l].out)->d[i] = in.c[i] + product[l / 4 + 8 * (i / 2)][l % 4 * 2 + i % 2];
    }
}

#define MMA(name, operands, operand)                                                                                            \
    inline void name(int line, float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,  \
                     unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) {                                        \
        const MmaIn in{{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};                                                           \
        MmaOut out;                                                                                                             \
        emulator::warp_collective("mma", line, 0xffffffffu, &in, &out, multiply_fragments<operands, operand>);                  \
        d0 = out.d[0], d1 = out.d[1], d2 = out.d[2], d3 = out.d[3];                                                             \
    }
MMA(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, 2, half_of)
MMA(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, 2, bfloat_of)
MMA(mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32, 1, tf32_of)
#undef MMA

}  // namespace ptx
