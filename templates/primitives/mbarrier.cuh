// An mbarrier: eight bytes of shared memory that count, in phases, threads that arrive and bytes that copies bring. A phase
// completes when `arrivals` threads have arrived and all bytes that they announced are there; then the next one begins.
//: __syncthreads is one barrier for everyone: who waits for a tile also waits for all that the others do. An mbarrier is a
//: number in shared memory, as many as one likes: here two for each buffer, "full" and "empty". And copies can arrive at
//: it, which no __syncthreads can wait for: it counts their bytes.

// One thread does this once for each barrier, then a fence for the copy engine, then all meet at __syncthreads().
__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier_smem, unsigned arrivals) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Counts one arrival. What this thread did before is seen by whoever waits for the phase.
__device__ __forceinline__ void mbarrier_arrive(unsigned long long* barrier_smem) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Announces `bytes` that copies will bring in this phase, and counts one arrival.
__device__ __forceinline__ void mbarrier_expect_bytes(unsigned long long* barrier_smem, unsigned bytes) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity: phases 0, 2, 4, ... have parity 0. Before the first phase has ended the one
// of parity 1 counts as ended: a producer's first wait for an empty buffer passes at once.
//: A phase has no number, only a parity: who waits must not be two phases behind, which the pair full and empty sees to.
//: try_wait suspends the thread in hardware for a while; the loop is for the rare case that this was not long enough.
__device__ __forceinline__ void mbarrier_wait(unsigned long long* barrier_smem, unsigned parity) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    unsigned completed = 0;
    while (!completed) {
        asm volatile(
            "{ .reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(completed)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}
