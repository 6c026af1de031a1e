// The meaning of reductions to global memory (PTX ISA, "red").
#pragma once

namespace ptx {

inline void red_relaxed_gpu_global_add_v4_f32(int line, float* to, float a, float b, float c, float d) {
    const float by[] = {a, b, c, d};
    emulator::global_add(to, by, 4, line);
}
inline void red_relaxed_gpu_global_add_f32(int line, float* to, float a) { emulator::global_add(to, &a, 1, line); }

}  // namespace ptx
