// Not inlined: a file that uses it often has its code once.
__device__ __noinline__ float called_sin(float x) { return sinf(x); }
