// What a generated kernel sees on the CPU: CUDA's keywords, built-in variables and functions. Included before its text.
// A kernel is compiled without the C++ standard library's headers: parsing them takes longer than all else of a small kernel.
#pragma once
#include <math.h>
#include <string.h>

#include "emulator.hpp"

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("attngen_shared")))

#define threadIdx emulator::thread_position()
#define blockIdx emulator::block_position()
#define blockDim emulator::block_size()
#define gridDim emulator::grid_size()

#define __syncthreads() emulator::block_barrier(__LINE__)
#define __syncwarp(...) emulator::warp_barrier(__LINE__, emulator::mask_or_all(__VA_ARGS__))
#define __shfl_sync(mask, value, ...) emulator::shuffle(__LINE__, mask, value, emulator::lane_at(__VA_ARGS__))
#define __shfl_xor_sync(mask, value, ...) emulator::shuffle(__LINE__, mask, value, emulator::lane_xor(__VA_ARGS__))
#define __shfl_up_sync(mask, value, ...) emulator::shuffle(__LINE__, mask, value, emulator::lane_up(__VA_ARGS__))
#define __shfl_down_sync(mask, value, ...) emulator::shuffle(__LINE__, mask, value, emulator::lane_down(__VA_ARGS__))
#define __ballot_sync(mask, vote) emulator::ballot(__LINE__, mask, vote)
#define __ffs __builtin_ffs
#define __popc __builtin_popcount
#define __any_sync(mask, vote) (emulator::ballot(__LINE__, mask, vote) != 0)
#define __all_sync(mask, vote) (emulator::ballot(__LINE__, mask, !(vote)) == 0)
#define __cvta_generic_to_shared(pointer) emulator::shared_address(pointer)

// The value before the update is the result.
#define atomicAdd(address, by) emulator::atomic_sum(address, by, __LINE__)
#define atomicInc(address, most) emulator::atomic_update(address, most, [](unsigned a, unsigned b) { return a >= b ? 0 : a + 1; }, __LINE__)
#define atomicExch(address, value) emulator::atomic_update(address, value, [](unsigned, unsigned b) { return b; }, __LINE__)

#define assert(condition) ((condition) ? (void)0 : emulator::stop_kernel("the assertion " #condition " fails", __LINE__))
#define __trap() emulator::stop_kernel("the kernel calls __trap()", __LINE__)
#define __threadfence() ((void)0)
#define __threadfence_block() ((void)0)
extern "C" int printf(const char*, ...);

// The approximate functions of CUDA, as accurate ones.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
inline float __fdividef(float a, float b) { return a / b; }

namespace emulator {
// The lane that a shuffle reads; its own past the end of its part of `width` lanes (CUDA programming guide, "Warp Shuffle Functions").
inline int lane_at(int source, int width = 32) { return (lane_index() & -width) | (source & (width - 1)); }
inline int lane_xor(int lanes, int width = 32) {
    const int source = lane_index() ^ lanes;
    return source >= (lane_index() & -width) + width ? lane_index() : source;
}
inline int lane_up(unsigned by, int width = 32) {
    const int source = lane_index() - int(by);
    return source < (lane_index() & -width) ? lane_index() : source;
}
inline int lane_down(unsigned by, int width = 32) {
    const int source = lane_index() + int(by);
    return source >= (lane_index() & -width) + width ? lane_index() : source;
}
inline unsigned mask_or_all(unsigned mask = 0xffffffffu) { return mask; }

inline float atomic_sum(float* address, float by, int line) {
    const float before = *address;
    atomic_add(address, &by, 1, line);
    return before;
}
inline unsigned atomic_sum(unsigned* address, unsigned by, int line) {
    return atomic_update(address, by, [](unsigned a, unsigned b) { return a + b; }, line);
}
inline int atomic_sum(int* address, int by, int line) { return int(atomic_sum((unsigned*)address, unsigned(by), line)); }
inline unsigned long long atomic_sum(unsigned long long* address, unsigned long long by, int line) {
    return atomic_update(address, by, [](unsigned long long a, unsigned long long b) { return a + b; }, line);
}
}  // namespace emulator

constexpr int warpSize = 32;
struct alignas(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct int3 { int x, y, z; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <typename T> inline T __ldg(const T* address) { return *address; }

// C has abs of int alone; the C++ library's headers, which an include path of the environment can bring, have it of more types.
#define abs(value) emulator::absolute(value)
namespace emulator {
template <typename T> inline T absolute(T value) { return value < 0 ? -value : value; }
}

template <typename To, typename From> inline To bits_as(From from) {
    To to;
    static_assert(sizeof(To) == sizeof(From), "same size");
    memcpy(&to, &from, sizeof(to));
    return to;
}
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }  // mixed types as CUDA's math_functions.hpp has them
inline double max(float a, double b) { return fmax(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(double a, float b) { return fmax(a, b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline float __fmul_rn(float a, float b) { return a * b; }  // never joined with an addition
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __float2int_rz(float x) { return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : int(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
