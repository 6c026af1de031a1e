// Products of a warpgroup run in the background, in groups. From the issue of a product until its group has been waited for,
// its accumulators belong to it: no thread may read or write them.
//: With mma.sync a warp hands over its operands in registers. A wgmma is told where they lie in shared memory (A may come
//: from registers): no ldmatrix, and B, which is keys or values, is read once for 64 rows, where a warp of the fused rung
//: reads it for its 16 or 32.

// Before the first product, and after any other access to the registers of one: orders them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of products.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups are still under way.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// After wgmma_wait: keeps the compiler from moving a use of the accumulators to before it, where ptxas would have to wait too.
template <int N> __device__ __forceinline__ void wgmma_received(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Where an operand lies, in rows of 128 bytes with the 128-byte swizzle (the tile begins at a multiple of 1024 bytes).
// `stride_bytes`: from one group of eight rows to the next, 1024. `leading_bytes`: of an MN-major operand, from 64 of its rows
// or columns to the next 64; of a K-major one it is not used. Adding bytes / 16 to a descriptor moves it.
//: The swizzle exchanges the 16-byte chunks of a row by its number modulo 8: a column of eight rows then lies in all 32
//: banks, as the padding of the fused rung does it, without its bytes. TMA writes and wgmma reads in this order by
//: themselves.
__device__ __forceinline__ unsigned long long smem_descriptor(const void* tile_smem, unsigned leading_bytes,
                                                              unsigned stride_bytes) {
    constexpr unsigned long long SWIZZLE_128_BYTES = 1ull << 62;
    const unsigned address = (unsigned)__cvta_generic_to_shared(tile_smem);
    const unsigned low = (leading_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
    return SWIZZLE_128_BYTES | (unsigned long long)(stride_bytes >> 4) << 32 | low;
}
