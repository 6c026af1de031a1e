// `lse`, or 0 if it is -inf, because the row has no keys: exp(-inf - 0) = 0, not NaN.
__device__ __forceinline__ float finite_or_0(float lse) {
    return lse == -INF ? 0.0f : lse;
}
