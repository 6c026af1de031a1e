// The meaning of griddepcontrol: kernels run one after another, and those that a GPU may start earlier touch no global memory before
// they have waited.
#pragma once

namespace ptx {

inline void griddepcontrol_wait(int) { emulator::wait_for_kernels_before(); }
inline void griddepcontrol_launch_dependents(int) {}

}  // namespace ptx
