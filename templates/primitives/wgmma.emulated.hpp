// The meaning of wgmma with operands of 16 bits (m64nNk16) or 8 (m64nNk32), for every N: the instruction's operands handed to the runtime.
#pragma once

#include "convert.emulated.hpp"

namespace ptx {

// A register of D by its address, or the value of any other operand.
struct WgmmaOperand {
    float* d = nullptr;
    unsigned long long value = 0;
    WgmmaOperand(float& register_of_d) : d(&register_of_d) {}
    WgmmaOperand(unsigned long long bits) : value(bits) {}
};

// After D: A (four registers or a descriptor), B, whether to accumulate, two signs, and of 16 bits, which operands in memory are MN-major.
template <int N, int BYTES, int OPERANDS>
inline void wgmma(int line, const WgmmaOperand (&operands)[OPERANDS], float (*to_float)(unsigned short)) {
    constexpr int D = N / 2, LEAST = D + 5 + (BYTES == 2 ? 2 : 0);
    constexpr bool A_IN_REGISTERS = OPERANDS > LEAST;
    static_assert(OPERANDS == LEAST || OPERANDS == LEAST + (BYTES == 2 ? 2 : 3), "the operands of wgmma");
    const WgmmaOperand* next = operands + D;
    emulator::Wgmma product = {N, BYTES, operands[0].d, A_IN_REGISTERS};
    if (A_IN_REGISTERS)
        for (unsigned& a : product.a_registers) a = (unsigned)(next++)->value;
    else
        product.a = (next++)->value;
    product.b = (next++)->value;
    product.accumulate = (next++)->value;
    next += 2;
    product.a_transposed = BYTES == 2 && !A_IN_REGISTERS && (next++)->value;
    product.b_transposed = BYTES == 2 && next->value;
    product.to_float = to_float;
    emulator::wgmma_issue(product, line);
}

inline float from_byte_e4m3(unsigned short bits) { return from_half(from_e4m3(bits)); }
inline float from_byte_e5m2(unsigned short bits) { return from_half(bits << 8); }

#define WGMMA(name, bytes, to_float)                                                                                         \
    template <int N, typename... T> __attribute__((no_sanitize("thread"))) inline void name(int line, T&&... operands) { \
        wgmma<N, bytes>(line, {WgmmaOperand(operands)...}, to_float);                                                         \
    }
WGMMA(wgmma_mma_async_sync_aligned_m64nNk16_f32_f16_f16, 2, from_half)
WGMMA(wgmma_mma_async_sync_aligned_m64nNk16_f32_bf16_bf16, 2, from_bfloat)
WGMMA(wgmma_mma_async_sync_aligned_m64nNk32_f32_e4m3_e4m3, 1, from_byte_e4m3)
WGMMA(wgmma_mma_async_sync_aligned_m64nNk32_f32_e5m2_e5m2, 1, from_byte_e5m2)
#undef WGMMA

inline void wgmma_fence_sync_aligned(int) { emulator::wgmma_fence(); }
inline void wgmma_commit_group_sync_aligned(int line) { emulator::wgmma_commit(line); }
inline void wgmma_wait_group_sync_aligned(int line, int pending) { emulator::wgmma_wait(pending, line); }

}  // namespace ptx
