// The sum of x over the lanes in `mask`, for each of them.
__device__ __forceinline__ int reduce_add(unsigned mask, int x) { return __reduce_add_sync(mask, x); }
