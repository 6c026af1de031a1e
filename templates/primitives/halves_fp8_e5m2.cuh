// The two numbers of e5m2 in the lower 16 bits of `two`, as fp16: each is the upper half of one.
__device__ __forceinline__ unsigned halves_of(unsigned two) { return permute_bytes(two, 0, 0x1404); }
