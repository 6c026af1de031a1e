// The meaning of wgmma.m64nNk16 with fp16 or bf16 operands, for every N: the instruction's operands handed to the runtime.
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

// After D: A (four registers or a descriptor), B, whether to accumulate, two signs, and which operands in memory are MN-major.
template <int N, int OPERANDS> inline void wgmma(int line, const WgmmaOperand (&operands)[OPERANDS], float (*to_float)(unsigned short)) {
    constexpr int D = N / 2;
    constexpr bool A_IN_REGISTERS = OPERANDS == D + 9;
    static_assert(A_IN_REGISTERS || OPERANDS == D + 7, "the operands of m64nNk16");
    const WgmmaOperand* next = operands + D;
    emulator::Wgmma product = {N, operands[0].d, A_IN_REGISTERS};
    if (A_IN_REGISTERS)
        for (unsigned& a : product.a_registers) a = (unsigned)(next++)->value;
    else
        product.a = (next++)->value;
    product.b = (next++)->value;
    product.accumulate = (next++)->value;
    next += 2;
    product.a_transposed = !A_IN_REGISTERS && (next++)->value;
    product.b_transposed = next->value;
    product.to_float = to_float;
    emulator::wgmma_issue(product, line);
}

#define WGMMA(name, to_float)                                                                                         \
    template <int N, typename... T> __attribute__((no_sanitize("thread"))) inline void name(int line, T&&... operands) { \
        wgmma<N>(line, {WgmmaOperand(operands)...}, to_float);                                                         \
    }
WGMMA(wgmma_mma_async_sync_aligned_m64nNk16_f32_f16_f16, from_half)
WGMMA(wgmma_mma_async_sync_aligned_m64nNk16_f32_bf16_bf16, from_bfloat)
#undef WGMMA

inline void wgmma_fence_sync_aligned(int) { emulator::wgmma_fence(); }
inline void wgmma_commit_group_sync_aligned(int line) { emulator::wgmma_commit(line); }
inline void wgmma_wait_group_sync_aligned(int line, int pending) { emulator::wgmma_wait(pending, line); }

}  // namespace ptx
