// Not inlined: a file that uses it often has its code once.
__device__ __noinline__ float called_atan2(float y, float x) { return atan2f(y, x); }
