// The meaning of barriers of some warps, and of setmaxnreg. bar.warp.sync stands for the order of a thread's own operations alone.
#pragma once

namespace ptx {

inline void bar_sync(int line, unsigned id, unsigned threads) { emulator::named_barrier(id, threads, true, line); }
inline void bar_sync(int line, unsigned id) {  // all threads of the block wait
    const dim3 block = emulator::block_size();
    emulator::named_barrier(id, block.x * block.y * block.z, true, line);
}
inline void bar_arrive(int line, unsigned id, unsigned threads) { emulator::named_barrier(id, threads, false, line); }
inline void bar_red_popc_u32(int line, unsigned& count, unsigned id, unsigned threads, bool vote) {
    count = emulator::named_barrier(id, threads, true, line, vote);
}
inline void bar_warp_sync(int, unsigned) {}
inline void setmaxnreg_inc_sync_aligned_u32(int line, unsigned registers) { emulator::set_registers(true, registers, line); }
inline void setmaxnreg_dec_sync_aligned_u32(int line, unsigned registers) { emulator::set_registers(false, registers, line); }

}  // namespace ptx
