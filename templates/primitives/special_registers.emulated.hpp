// The meaning of mov from a special register.
#pragma once

namespace ptx {

inline void mov_u32(int, unsigned& to, unsigned from) { to = from; }

}  // namespace ptx
