// An mbarrier: eight bytes of shared memory that count, in phases, threads that arrive and bytes that copies bring. A phase
// completes when `arrivals` threads have arrived and all bytes that they announced have come; then the next one begins.
//: __syncthreads is one barrier for the whole block: a thread that waits for a tile also waits for all work of the other
//: threads before it. mbarriers are words in shared memory: there can be one for each buffer and each state. Copies can arrive
//: at them too, which __syncthreads cannot wait for: an mbarrier counts their bytes.

// One thread calls this for each barrier, and then a fence for the copy engine; then all threads meet at __syncthreads().
__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier_smem, unsigned arrivals) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
