// Copies 4 bytes from global to shared memory in the background; if `inside` is false it writes zero and reads nothing.
__device__ __forceinline__ void cp_async_4(void* to_smem, const void* from_gmem, bool inside) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(to_smem);
    const int bytes = inside ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from_gmem), "r"(bytes) : "memory");
}
