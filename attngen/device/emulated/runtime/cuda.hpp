// What a generated kernel sees on the CPU: CUDA's keywords, built-in variables and functions. Included before its text.
// A kernel is compiled without the C++ standard library's headers: parsing them takes longer than all else of a small kernel.
#pragma once
#include <math.h>
#include <string.h>

#include "emulator.hpp"

#define __global__ __attribute__((noinline))
#define __device__
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
#define __syncwarp(...) emulator::warp_barrier(__LINE__, 0xffffffffu)
#define __shfl_sync(mask, value, source) emulator::shuffle(__LINE__, mask, value, source)
#define __shfl_xor_sync(mask, value, lanes) emulator::shuffle(__LINE__, mask, value, emulator::lane_index() ^ (lanes))
#define __shfl_up_sync(mask, value, by) emulator::shuffle(__LINE__, mask, value, emulator::lane_index() - int(by) < 0 ? emulator::lane_index() : emulator::lane_index() - int(by))
#define __shfl_down_sync(mask, value, by) emulator::shuffle(__LINE__, mask, value, emulator::lane_index() + int(by) > 31 ? emulator::lane_index() : emulator::lane_index() + int(by))
#define __ballot_sync(mask, vote) emulator::ballot(__LINE__, mask, vote)
#define __ffs __builtin_ffs
#define __popc __builtin_popcount
#define __any_sync(mask, vote) (emulator::ballot(__LINE__, mask, vote) != 0)
#define __all_sync(mask, vote) (emulator::ballot(__LINE__, mask, !(vote)) == 0)
#define __cvta_generic_to_shared(pointer) emulator::shared_address(pointer)

// The value before the update is the result.
#define atomicAdd(address, by) emulator::atomic_update(address, by, [](auto a, auto b) { return a + b; }, __LINE__)
#define atomicInc(address, most) emulator::atomic_update(address, most, [](unsigned a, unsigned b) { return a >= b ? 0 : a + 1; }, __LINE__)
#define atomicExch(address, value) emulator::atomic_update(address, value, [](unsigned, unsigned b) { return b; }, __LINE__)

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
inline float __fmul_rn(float a, float b) { return a * b; }  // never joined with an addition
inline int __float2int_rz(float x) { return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : int(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
