// As tma_store, of a tensor map of five dimensions.
__device__ __forceinline__ void tma_store_5d(const TensorMap* map, const void* from_smem, int c0, int c1, int c2, int c3,
                                             int c4) {
    const unsigned from = (unsigned)__cvta_generic_to_shared(from_smem);
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, { %1, %2, %3, %4, %5}], [%6];" ::"l"(map),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(from)
                 : "memory");
}
