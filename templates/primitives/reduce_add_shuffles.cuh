// The sum of x over the lanes in `mask`, for each of them.
__device__ __forceinline__ int reduce_add(unsigned mask, int x) {
    int sum = 0;
    for (unsigned left = mask; left != 0; left &= left - 1) sum += __shfl_sync(mask, x, __ffs(left) - 1);
    return sum;
}
