__device__ __forceinline__ float to_float(float x) { return x; }
