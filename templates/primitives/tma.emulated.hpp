// The meaning of bulk copies: boxes that move in the background, between a tensor map's tensor and shared memory, or an array.
#pragma once

namespace ptx {

inline void cp_async_bulk_tensor_4d_shared_cta_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint(
    int line, unsigned to, const void* map, int c0, int c1, int c2, int c3, unsigned barrier, unsigned long long) {
    emulator::tma_load(4, to, map, {{c0, c1, c2, c3}}, barrier, line);
}
inline void cp_async_bulk_tensor_5d_shared_cta_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint(
    int line, unsigned to, const void* map, int c0, int c1, int c2, int c3, int c4, unsigned barrier, unsigned long long) {
    emulator::tma_load(5, to, map, {{c0, c1, c2, c3, c4}}, barrier, line);
}
inline void cp_async_bulk_shared_cta_global_mbarrier_complete_tx_bytes(int line, unsigned to, const void* from, unsigned bytes,
    unsigned barrier) {
    emulator::bulk_load(to, from, bytes, barrier, line);
}
inline void cp_async_bulk_tensor_4d_global_shared_cta_tile_bulk_group(int line, const void* map, int c0, int c1, int c2, int c3,
    unsigned from) {
    emulator::tma_store(4, map, {{c0, c1, c2, c3}}, from, line);
}
inline void cp_async_bulk_tensor_5d_global_shared_cta_tile_bulk_group(int line, const void* map, int c0, int c1, int c2, int c3, int c4,
                                                                      unsigned from) {
    emulator::tma_store(5, map, {{c0, c1, c2, c3, c4}}, from, line);
}
inline void cp_async_bulk_commit_group(int) { emulator::tma_store_commit(); }
inline void cp_async_bulk_wait_group_read(int, int pending) { emulator::tma_store_wait(pending, true); }
inline void cp_async_bulk_wait_group(int, int pending) { emulator::tma_store_wait(pending, false); }
inline void fence_proxy_async_shared_cta(int) { emulator::proxy_fence(); }

}  // namespace ptx
