// Copies 16 bytes from global to shared memory in the background; if `inside` is false it writes zeros and reads nothing.
//: An ordinary load brings a number from memory to a register, and a store takes it to shared memory: two instructions, a
//: register that is occupied for some 500 clocks on a miss, and a thread that stalls at the first use. cp.async returns
//: immediately; the bytes go from L2 directly to shared memory (.cg bypasses L1: no thread reads them twice).
__device__ __forceinline__ void cp_async_16(void* to_smem, const void* from_gmem, bool inside) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(to_smem);
    const int bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from_gmem), "r"(bytes) : "memory");
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are still under way.
//: The wait covers the copies of this thread only. A barrier must follow to ensure that those of other threads have arrived:
//: always the pair cp_async_wait, __syncthreads.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
