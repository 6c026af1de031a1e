// The meaning of cp.async: a copy in the background that is sure to have happened only when its group has been waited for.
#pragma once

namespace ptx {

inline void cp_async_cg_shared_global(int line, unsigned to, const void* from, int bytes, int source_bytes) {
    emulator::async_copy(to, from, bytes, source_bytes, line);
}
inline void cp_async_cg_shared_global_L2_256B(int line, unsigned to, const void* from, int bytes, int source_bytes) {
    emulator::async_copy(to, from, bytes, source_bytes, line);
}
inline void cp_async_ca_shared_global(int line, unsigned to, const void* from, int bytes, int source_bytes) {
    emulator::async_copy(to, from, bytes, source_bytes, line);
}
inline void cp_async_commit_group(int) { emulator::async_commit(); }
inline void cp_async_wait_group(int, int pending) { emulator::async_wait(pending); }

}  // namespace ptx
