// Copies a box from shared memory to the tensor of five dimensions at (c0, ..., c4) in the background; what lies past the
// tensor's end is not written. One thread issues it, after all threads that wrote the box have called async_proxy_fence() and
// then met this thread at a barrier.
//: The box must not begin before the tensor: where a load brings zeros, a store stops the GPU with an illegal instruction.
__device__ __forceinline__ void tma_store_5d(const TensorMap* map, const void* from_smem, int c0, int c1, int c2, int c3,
                                             int c4) {
    const unsigned from = (unsigned)__cvta_generic_to_shared(from_smem);
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, { %1, %2, %3, %4, %5}], [%6];" ::"l"(map),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(from)
                 : "memory");
}
