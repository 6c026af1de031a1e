// The meaning of mbarrier. A try_wait gives up on the hardware after a while; here it waits.
#pragma once

namespace ptx {

inline void mbarrier_init_shared_cta_b64(int line, unsigned barrier, unsigned arrivals) {
    emulator::mbarrier_init(barrier, arrivals, line);
}
inline void fence_mbarrier_init_release_cluster(int) { emulator::mbarrier_init_fence(); }
inline void mbarrier_arrive_shared_cta_b64(int line, unsigned barrier) { emulator::mbarrier_arrive(barrier, 0, line); }
inline void mbarrier_arrive_expect_tx_shared_cta_b64(int line, unsigned barrier, unsigned bytes) {
    emulator::mbarrier_arrive(barrier, bytes, line);
}
inline void mbarrier_try_wait_parity_shared_cta_b64(int line, bool& completed, unsigned barrier, unsigned parity) {
    emulator::mbarrier_wait(barrier, parity, line);
    completed = true;
}

}  // namespace ptx
