// What a generated kernel sees on the CPU: CUDA's keywords, built-in variables and functions. Included before its text.
// A kernel is compiled without the C++ standard library's headers: parsing them takes longer than all else of a small kernel.
#pragma once
#define _USE_MATH_DEFINES  // M_PI, on Windows
#include <math.h>
#include <string.h>

#include "emulator.hpp"
#include "platform.hpp"

#ifndef isnan  // of C; macOS leaves these macros to the C++ library
#define isnan(x) __builtin_isnan(x)
#define isinf(x) __builtin_isinf(x)
#define isfinite(x) __builtin_isfinite(x)
#define signbit(x) __builtin_signbit(x)
#endif

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ EMULATOR_SHARED

#define threadIdx emulator::thread_position()
#define blockIdx emulator::block_position()
#define blockDim emulator::block_size()
#define gridDim emulator::grid_size()

#define __syncthreads() emulator::block_barrier(__LINE__)
#define __syncthreads_count(vote) emulator::block_count(vote, __LINE__)
#define __syncthreads_or(vote) int(emulator::block_count(vote, __LINE__) != 0)
#define __syncthreads_and(vote) int(emulator::block_count(!(vote), __LINE__) == 0)
#define __syncwarp(...) emulator::warp_barrier(__LINE__, emulator::mask_or_all(__VA_ARGS__))
#define __shfl_sync(mask, value, ...) emulator::shuffle(__LINE__, mask, value, emulator::lane_at(__VA_ARGS__))
#define __shfl_xor_sync(mask, value, ...) emulator::shuffle(__LINE__, mask, value, emulator::lane_xor(__VA_ARGS__))
#define __shfl_up_sync(mask, value, ...) emulator::shuffle(__LINE__, mask, value, emulator::lane_up(__VA_ARGS__))
#define __shfl_down_sync(mask, value, ...) emulator::shuffle(__LINE__, mask, value, emulator::lane_down(__VA_ARGS__))
#define __ballot_sync(mask, vote) emulator::ballot(__LINE__, mask, vote)
#define __activemask() emulator::active_mask(__LINE__)
#define __match_any_sync(mask, value) emulator::match_any(emulator::gather(__LINE__, mask, value))
#define __match_all_sync(mask, value, all) emulator::match_all(emulator::gather(__LINE__, mask, value), all)
#define __reduce_add_sync(mask, value) emulator::reduce(__LINE__, mask, value, [](auto a, auto b) { return a + b; })
#define __reduce_min_sync(mask, value) emulator::reduce(__LINE__, mask, value, [](auto a, auto b) { return b < a ? b : a; })
#define __reduce_max_sync(mask, value) emulator::reduce(__LINE__, mask, value, [](auto a, auto b) { return b > a ? b : a; })
#define __reduce_and_sync(mask, value) emulator::reduce(__LINE__, mask, value, [](auto a, auto b) { return a & b; })
#define __reduce_or_sync(mask, value) emulator::reduce(__LINE__, mask, value, [](auto a, auto b) { return a | b; })
#define __reduce_xor_sync(mask, value) emulator::reduce(__LINE__, mask, value, [](auto a, auto b) { return a ^ b; })
#define __any_sync(mask, vote) (emulator::ballot(__LINE__, mask, vote) != 0)
#define __all_sync(mask, vote) (emulator::ballot(__LINE__, mask, !(vote)) == 0)
#define __cvta_generic_to_shared(pointer) emulator::shared_address(pointer)

// The value before the update is the result.
#define atomicAdd(address, by) emulator::update_add(address, by, __LINE__)
#define atomicSub(address, by) emulator::update_sub(address, by, __LINE__)
#define atomicExch(address, by) emulator::update_exch(address, by, __LINE__)
#define atomicMin(address, by) emulator::update_min(address, by, __LINE__)
#define atomicMax(address, by) emulator::update_max(address, by, __LINE__)
#define atomicInc(address, most) emulator::update_inc(address, most, __LINE__)
#define atomicDec(address, most) emulator::update_dec(address, most, __LINE__)
#define atomicAnd(address, by) emulator::update_and(address, by, __LINE__)
#define atomicOr(address, by) emulator::update_or(address, by, __LINE__)
#define atomicXor(address, by) emulator::update_xor(address, by, __LINE__)
#define atomicCAS(address, expected, value) emulator::update_cas(address, expected, value, __LINE__)

#define assert(condition) ((condition) ? (void)0 : emulator::stop_kernel("the assertion " #condition " fails", __LINE__))
#define __trap() emulator::stop_kernel("the kernel calls __trap()", __LINE__)
#define __threadfence emulator::thread_fence
#define __threadfence_block emulator::thread_fence
#define __threadfence_system emulator::thread_fence
#define __nanosleep(nanoseconds) ((void)(nanoseconds))
#define __builtin_assume(condition) ((void)0)
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

template <typename T> inline unsigned match_any(const Gathered<T>& values) {
    unsigned alike = 0;
    for (int i = 0; i < 32; ++i)
        if (values.lanes >> i & 1 && values.of[i] == values.of[lane_index()]) alike |= 1u << i;
    return alike;
}
template <typename T> inline unsigned match_all(const Gathered<T>& values, int* all) {
    *all = match_any(values) == values.lanes;
    return *all ? values.lanes : 0;
}
template <typename T, typename Join> inline T reduce(int line, unsigned mask, T value, Join join) {
    static_assert(T(0.5) == T(0) && sizeof(T) == 4, "reductions of a warp are of int and unsigned");
    const Gathered<T> values = gather(line, mask, value);
    for (int i = 0; i < 32; ++i)
        if (values.lanes >> i & 1 && i != lane_index()) value = T(join(value, values.of[i]));
    return value;
}

template <typename T, typename Update> inline T atomically(T* address, int line, Update update) {
    struct Call { const Update& update; T before; } call{update, {}};
    atomic_update(address, sizeof(T), T(0.5) == T(0), [](void* value, void* with) {
        Call& call = *(Call*)with;
        call.before = *(T*)value;
        *(T*)value = call.update(call.before);
    }, &call, line);
    return call.before;
}
#define UPDATE(name, T, after) inline T update_##name(T* address, T by, int line) { return atomically(address, line, [=](T now) -> T { return after; }); }
#define UPDATES(name, after) UPDATE(name, int, after) UPDATE(name, unsigned, after) UPDATE(name, unsigned long long, after)
UPDATE(add, int, int(unsigned(now) + unsigned(by))) UPDATE(add, unsigned, now + by) UPDATE(add, unsigned long long, now + by)
UPDATE(add, float, now + by) UPDATE(add, double, now + by)
UPDATE(sub, int, int(unsigned(now) - unsigned(by))) UPDATE(sub, unsigned, now - by)
UPDATES(exch, by) UPDATE(exch, float, by)
UPDATES(min, by < now ? by : now) UPDATE(min, long long, by < now ? by : now)
UPDATES(max, by > now ? by : now) UPDATE(max, long long, by > now ? by : now)
UPDATE(inc, unsigned, now >= by ? 0 : now + 1)
UPDATE(dec, unsigned, now == 0 || now > by ? by : now - 1)
UPDATES(and, now & by) UPDATES(or, now | by) UPDATES(xor, now ^ by)
#undef UPDATES
#undef UPDATE
#define UPDATE(T) inline T update_cas(T* address, T expected, T value, int line) { return atomically(address, line, [=](T now) { return now == expected ? value : now; }); }
UPDATE(int) UPDATE(unsigned) UPDATE(unsigned long long) UPDATE(unsigned short)
#undef UPDATE
}  // namespace emulator

constexpr int warpSize = 32;
#define VECTORS(name, T)                                                                         \
    struct name##1 { T x; };                                                                      \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                            \
    struct name##3 { T x, y, z; };                                                                \
    struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };                 \
    inline name##1 make_##name##1(T x) { return {x}; }                                            \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                    \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                            \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(char, signed char) VECTORS(uchar, unsigned char) VECTORS(short, short) VECTORS(ushort, unsigned short)
VECTORS(int, int) VECTORS(uint, unsigned) VECTORS(float, float) VECTORS(double, double)
VECTORS(longlong, long long) VECTORS(ulonglong, unsigned long long)
#undef VECTORS
inline dim3::dim3(const uint3& v) : dim3(v.x, v.y, v.z) {}
inline dim3::operator uint3() const { return {x, y, z}; }
#define HINTED_LOAD(name) template <typename T> inline T name(const T* address) { return *address; }
#define HINTED_STORE(name) template <typename T> inline void name(T* address, T value) { *address = value; }
HINTED_LOAD(__ldg) HINTED_LOAD(__ldca) HINTED_LOAD(__ldcg) HINTED_LOAD(__ldcs) HINTED_LOAD(__ldlu) HINTED_LOAD(__ldcv)
HINTED_STORE(__stwb) HINTED_STORE(__stcg) HINTED_STORE(__stcs) HINTED_STORE(__stwt)
#undef HINTED_STORE
#undef HINTED_LOAD

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
inline long long __double_as_longlong(double x) { return bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return bits_as<double>(x); }

namespace emulator {
// A kernel's parameter, from memory of Python: its bytes are no access of the kernel.
template <typename T> struct Unqualified { using type = T; };
template <typename T> struct Unqualified<const T> { using type = T; };
template <typename T> __attribute__((no_sanitize("thread"))) inline typename Unqualified<T>::type parameter(const void* from) {
    typename Unqualified<T>::type value;
    __builtin_memcpy(&value, from, sizeof(value));
    return value;
}
}  // namespace emulator

#define EXTREMES(T)                                            \
    inline T min(T a, T b) { return a < b ? a : b; }           \
    inline T max(T a, T b) { return a > b ? a : b; }
EXTREMES(int) EXTREMES(unsigned) EXTREMES(long) EXTREMES(unsigned long) EXTREMES(long long) EXTREMES(unsigned long long)
#undef EXTREMES
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
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return float(1.0 / sqrt(double(x))); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline unsigned __brev(unsigned x) {
    for (int i = 0; i < 5; ++i) {
        constexpr unsigned MASKS[] = {0x55555555, 0x33333333, 0x0f0f0f0f, 0x00ff00ff, 0x0000ffff};
        x = (x >> (1 << i) & MASKS[i]) | (x & MASKS[i]) << (1 << i);
    }
    return x;
}
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return unsigned(((unsigned long long)high << 32 | low) << (by & 31) >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return unsigned(((unsigned long long)high << 32 | low) >> (by & 31)); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}

template <typename To> inline To saturated(double x, double low, double high) { return x != x ? 0 : x >= high ? To(high - 1) : x <= low ? To(low) : To(x); }
inline int __float2int_rz(float x) { return saturated<int>(trunc(x), -2147483648.0, 2147483648.0); }
inline int __float2int_rn(float x) { return saturated<int>(rint(x), -2147483648.0, 2147483648.0); }
inline int __float2int_rd(float x) { return saturated<int>(floor(x), -2147483648.0, 2147483648.0); }
inline int __float2int_ru(float x) { return saturated<int>(ceil(x), -2147483648.0, 2147483648.0); }
inline unsigned __float2uint_rz(float x) { return saturated<unsigned>(trunc(x), 0.0, 4294967296.0); }
inline unsigned __float2uint_rn(float x) { return saturated<unsigned>(rint(x), 0.0, 4294967296.0); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float fdividef(float a, float b) { return a / b; }
inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
inline float rhypotf(float x, float y) { return 1.0f / hypotf(x, y); }
inline float norm3df(float x, float y, float z) { return sqrtf(x * x + y * y + z * z); }
inline float normcdff(float x) { return float(0.5 * erfc(-double(x) * M_SQRT1_2)); }
inline float sinpif(float x) { return float(sin(M_PI * fmod(x, 2.0))); }
inline float cospif(float x) { return float(cos(M_PI * fmod(x, 2.0))); }
inline void sincospif(float x, float* sine, float* cosine) { *sine = sinpif(x), *cosine = cospif(x); }
#define __sincosf emulator::sine_and_cosine            // macOS has a function of this name
namespace emulator {
inline void sine_and_cosine(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }
}
