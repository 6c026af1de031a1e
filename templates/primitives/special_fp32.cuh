// Whether x is infinite or NaN.
__device__ __forceinline__ bool not_finite(float x) { return x - x != 0.0f; }
