// The meaning of the special function unit's instructions. The hardware's results differ by a few units in the last place; `ftz`
// takes denormals, given or resulting, for zero.
#pragma once

namespace ptx {

inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }

inline void ex2_approx_ftz_f32(int, float& d, float a) { d = flushed(exp2f(flushed(a))); }
inline void lg2_approx_ftz_f32(int, float& d, float a) { d = flushed(log2f(flushed(a))); }
inline void rcp_approx_ftz_f32(int, float& d, float a) { d = flushed(1.0f / flushed(a)); }
// As wrong as the PTX ISA allows, 2^-11 of the result: what passes here does not depend on the hardware's better luck.
inline void tanh_approx_f32(int, float& d, float a) { d = tanhf(a) * (1.0f + (signbit(a) ? -1.0f : 1.0f) * 0.00048828125f); }

inline void min_NaN_f32(int, float& d, float a, float b) { d = isnan(a) ? a : isnan(b) ? b : fminf(a, b); }

}  // namespace ptx
