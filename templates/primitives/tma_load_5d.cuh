// Copies the box at coordinates (c0, ..., c4), c0 the innermost, of a tensor map of five dimensions to shared memory in the
// background; elements outside the tensor arrive as zeros. One thread issues it. All its bytes, zeros included, count at
// `barrier_smem`.
__device__ __forceinline__ void tma_load_5d(void* to_smem, const TensorMap* map, unsigned long long* barrier_smem, int c0,
                                            int c1, int c2, int c3, int c4, unsigned long long l2_hint) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(to_smem);
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, { %2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier), "l"(l2_hint)
        : "memory");
}
