// Not inlined: a file that uses it often has its code once.
__device__ __noinline__ float called_pow(float x, float y) { return powf(x, y); }
