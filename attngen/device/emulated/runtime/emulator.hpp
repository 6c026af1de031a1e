// What a generated kernel sees on the CPU: CUDA's keywords, built-in variables and functions. Included before its text.
#pragma once
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct dim3 { unsigned x, y, z; };

namespace emulator {

// The position of the CUDA thread that is running now (scheduler.cpp).
struct Position { dim3 thread, block, block_size, grid; };
dim3 thread_position();
dim3 block_position();
dim3 block_size();
dim3 grid_size();
int lane_index();

// --- barriers and warps (scheduler.cpp)

void block_barrier(int line);
void warp_barrier(int line, unsigned mask);

// All lanes named by `mask` come here with `in`; the last one to arrive runs `combine` once for the warp; each leaves with `out`.
// lanes[i] are the arguments of lane i, null where it takes no part.
struct Lane { const void* in; void* out; };
using Combine = void (*)(Lane (&lanes)[32], int line);
void warp_collective(const char* what, int line, unsigned mask, const void* in, void* out, Combine combine);

// --- shared memory (memory.cpp)

unsigned char* dynamic_shared();
unsigned shared_address(const void* pointer);       // in the 32-bit window that PTX uses
void* shared_pointer(unsigned address);
void check_access(const void* address, int bytes, bool write, int line, int lane);  // for a Combine: by the lane that gave the address

// --- asynchronous copies (memory.cpp)

void async_copy(unsigned to, const void* from, int bytes, int source_bytes, int line);
void async_commit();
void async_wait(int pending);

// --- barriers in shared memory (mbarrier.cpp); an address is one of shared memory

void mbarrier_init(unsigned address, unsigned arrivals, int line);
void mbarrier_arrive(unsigned address, unsigned bytes, int line);
void mbarrier_wait(unsigned address, unsigned parity, int line);
void mbarrier_init_fence();         // order.cpp
void proxy_fence();                 // order.cpp

// --- barriers of some warps, and their registers (warpgroup.cpp)

void named_barrier(unsigned id, unsigned threads, bool waits, int line);
void set_registers(bool take, unsigned registers, int line);

// --- tensor copies (tma.cpp); of five coordinates those past the tensor's rank are 0

struct Coordinates { int at[5]; };
void tma_load(int rank, unsigned to, const void* map, Coordinates coordinates, unsigned barrier, int line);
void tma_store(int rank, const void* map, Coordinates coordinates, unsigned from, int line);
void tma_store_commit();
void tma_store_wait(int pending, bool only_read);

// --- products of a warpgroup (wgmma.cpp)

struct Wgmma {
    int columns;
    float* d;                       // of this thread: columns / 2 registers
    bool a_in_registers;
    unsigned a_registers[4];
    unsigned long long a, b;        // descriptors
    bool accumulate, a_transposed, b_transposed;
    float (*to_float)(unsigned short);
};
void wgmma_fence();
void wgmma_issue(const Wgmma& product, int line);
void wgmma_commit(int line);
void wgmma_wait(int pending, int line);

// --- atomic updates of global memory (memory.cpp)

unsigned atomic_update(unsigned* address, unsigned operand, unsigned (*update)(unsigned, unsigned), int line);

// --- counting

void count_instruction(int which);

template <typename T> inline T shuffle(int line, unsigned mask, T value, int source) {
    struct In { T value; int source; } in{value, source};
    T out;
    warp_collective("shuffle", line, mask, &in, &out, [](Lane (&lanes)[32], int) {
        for (auto& lane : lanes) {
            if (!lane.in) continue;
            const Lane& from = lanes[((const In*)lane.in)->source & 31];
            *(T*)lane.out = ((const In*)(from.in ? from.in : lane.in))->value;
        }
    });
    return out;
}

inline unsigned ballot(int line, unsigned mask, bool vote) {
    unsigned out;
    warp_collective("vote", line, mask, &vote, &out, [](Lane (&lanes)[32], int) {
        unsigned votes = 0;
        for (int i = 0; i < 32; ++i)
            if (lanes[i].in && *(const bool*)lanes[i].in) votes |= 1u << i;
        for (auto& lane : lanes)
            if (lane.in) *(unsigned*)lane.out = votes;
    });
    return out;
}

}  // namespace emulator

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
#define __any_sync(mask, vote) (emulator::ballot(__LINE__, mask, vote) != 0)
#define __all_sync(mask, vote) (emulator::ballot(__LINE__, mask, !(vote)) == 0)
#define __cvta_generic_to_shared(pointer) emulator::shared_address(pointer)

// The value before the update is the result.
#define atomicAdd(address, by) emulator::atomic_update(address, by, [](unsigned a, unsigned b) { return a + b; }, __LINE__)
#define atomicInc(address, most) emulator::atomic_update(address, most, [](unsigned a, unsigned b) { return a >= b ? 0 : a + 1; }, __LINE__)
#define atomicExch(address, value) emulator::atomic_update(address, value, [](unsigned, unsigned b) { return b; }, __LINE__)

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
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
