// As cp_async_16, for memory that is read once from end to end: L2 reads 256 bytes at a time.
//: Each chunk of 16 bytes is a request of its own; DRAM is fastest where neighbours are read together.
__device__ __forceinline__ void cp_async_stream_16(void* to_smem, const void* from_gmem, bool inside) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(to_smem);
    const int bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from_gmem), "r"(bytes) : "memory");
}
