// The meaning of the special function unit's instructions. The hardware's results differ by a few units in the last place; `ftz`
// takes denormals, given or resulting, for zero.
#pragma once

namespace ptx {

inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }

inline void ex2_approx_ftz_f32(int, float& d, float a) { d = flushed(exp2f(flushed(a))); }
inline void lg2_approx_ftz_f32(int, float& d, float a) { d = flushed(log2f(flushed(a))); }
inline void rcp_approx_ftz_f32(int, float& d, float a) { d = flushed(1.0f / flushed(a)); }
inline void tanh_approx_f32(int, float& d, float a) { d = tanhf(a); }

}  // namespace ptx
