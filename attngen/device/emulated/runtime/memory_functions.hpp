// memcpy, memmove and memset of a checked kernel: what they read and write is seen. Included last, in front of the kernel's text.
#pragma once

#define EMULATOR_SEEN(seen, function, bytes, ...) \
    (__builtin_constant_p(bytes) && ((bytes) == 1 || (bytes) == 2 || (bytes) == 4 || (bytes) == 8) ? function(__VA_ARGS__, bytes) : seen(__VA_ARGS__, bytes))

// GCC instruments what it turns into a load and a store, which is what a CUDA compiler makes of few bytes, and no call.
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t bytes);
extern "C" void* __tsan_memmove(void* to, const void* from, size_t bytes);
extern "C" void* __tsan_memset(void* to, int value, size_t bytes);
#define memcpy(to, from, bytes) EMULATOR_SEEN(__tsan_memcpy, __builtin_memcpy, bytes, to, from)
#define memmove(to, from, bytes) EMULATOR_SEEN(__tsan_memmove, __builtin_memmove, bytes, to, from)
#define memset(to, value, bytes) EMULATOR_SEEN(__tsan_memset, __builtin_memset, bytes, to, value)

#if defined(__clang__) && defined(__ELF__)
// clang calls these functions for copies of structs and arrays; before version 15, which other systems do not have, by the names of C.
asm("memcpy = __tsan_memcpy");
asm("memmove = __tsan_memmove");
asm("memset = __tsan_memset");
#endif
