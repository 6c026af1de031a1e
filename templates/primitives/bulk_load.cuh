// Copies `bytes` consecutive bytes, a multiple of 16 as both addresses are, to shared memory in the background; one thread issues
// it. The bytes count at `barrier_smem`.
//: What tma_load does for boxes of a tensor, without a tensor map: a contiguous array needs neither strides nor a swizzle.
__device__ __forceinline__ void bulk_load(void* to_smem, const void* from, unsigned bytes, unsigned long long* barrier_smem) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(to_smem);
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
