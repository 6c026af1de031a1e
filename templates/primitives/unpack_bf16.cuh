// The two elements that pack() joined, as fp32.
__device__ __forceinline__ float low_of(unsigned packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_of(unsigned packed) { return __uint_as_float(packed & 0xffff0000u); }
