// Before products that replace `d`: nobody needs what it holds. Without this, the old values count as an input of the first
// product, and the compiler keeps registers for them.
template <int N> __device__ __forceinline__ void wgmma_unset(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "=f"(d[i]));
}
