// Products of a warpgroup run in the background, in groups. From the issue of a product until its group has been waited for,
// its accumulators belong to it: no thread may read or write them.
//: mma.sync takes its operands from registers. wgmma reads them from shared memory (A may be in registers): no ldmatrix is
//: needed, and B, which is keys or values, is read once for 64 rows, whereas a warp of fused reads it for its 16 or 32.

// Orders other accesses to the registers of a product before it: required before the first product, and after each access.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of products.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups are still under way.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Called after wgmma_wait: keeps the compiler from moving a use of the accumulators before that wait, where ptxas would insert
// another one.
template <int N> __device__ __forceinline__ void wgmma_received(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The lower word of the descriptor of an operand in shared memory, in rows of 128 bytes with the 128-byte swizzle. It counts
// in units of 16 bytes: adding n moves the operand by 16 n bytes. The operand begins at a multiple of 1024 bytes.
// `leading_bytes`: the distance from 64 rows or columns of an MN-major operand to the next 64; not used for a K-major one.
__device__ __forceinline__ unsigned smem_operand(const void* operand_smem, unsigned leading_bytes) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(operand_smem);
    return (leading_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// The descriptor that wgmma reads. Its upper word has the swizzle, and the stride of 1024 bytes from eight rows to the next
// eight.
__device__ __forceinline__ unsigned long long smem_descriptor(unsigned operand) {
    constexpr unsigned long long SWIZZLE_128_BYTES = 1ull << 62, STRIDE = (1024ull >> 4) << 32;
    return SWIZZLE_128_BYTES | STRIDE | operand;
}
