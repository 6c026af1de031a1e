// Copies a box from shared memory to the tensor at (c0, c1, c2, c3) in the background; what lies past the tensor's end is not
// written. One thread issues it, after all threads that wrote the box have called async_proxy_fence() and then met this thread
// at a barrier.
//: The box must not begin before the tensor: where a load brings zeros, a store stops the GPU with an illegal instruction.
//: No thread waits for the bytes to arrive: the rows are read from shared memory while the next products begin.
__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from_smem, int c0, int c1, int c2, int c3) {
    const unsigned from = (unsigned)__cvta_generic_to_shared(from_smem);
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, { %1, %2, %3, %4}], [%5];" ::"l"(map),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(from)
                 : "memory");
}

// Closes a group of this thread's stores.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups still read shared memory, which may then be written again.
template <int PENDING> __device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until at most PENDING of this thread's latest groups are still under way; the writes of older groups are visible then.
template <int PENDING> __device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}
