__device__ __forceinline__ float to_fp32(float x) { return x; }
