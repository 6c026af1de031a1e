// Copies 16 bytes from global to shared memory in the background; if `inside` is false it writes zeros and reads nothing.
//: An ordinary load brings a number from memory to a register, and a store takes it to shared memory: two instructions, a
//: register held for the some 500 clocks of a miss, and a thread that stops where the number is used. cp.async asks and
//: goes on; the bytes go from L2 (.cg: not through L1, which would keep what nobody reads twice) straight to shared
//: memory.
__device__ __forceinline__ void cp_async_16(void* to_smem, const void* from_gmem, bool inside) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(to_smem);
    const int bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from_gmem), "r"(bytes) : "memory");
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are still under way.
//: The wait is for the copies of this thread alone. That the others' have come too takes a barrier after it: always the
//: pair cp_async_wait, __syncthreads.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
