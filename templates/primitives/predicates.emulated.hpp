// The meaning of setp and selp: predicates made from registers and registers from predicates.
#pragma once

namespace ptx {

inline void setp_ne_b32(int, bool& p, unsigned a, unsigned b) { p = a != b; }
inline void selp_u32(int, unsigned& d, unsigned a, unsigned b, bool p) { d = p ? a : b; }

}  // namespace ptx
