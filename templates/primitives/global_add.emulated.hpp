// The meaning of reductions to global memory (PTX ISA, "red").
#pragma once

namespace ptx {

inline void red_relaxed_gpu_global_add_v4_f32(int line, float* to, float a, float b, float c, float d) {
    emulator::atomic_add(to, {a, b, c, d}, line);
}

}  // namespace ptx
