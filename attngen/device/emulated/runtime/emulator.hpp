// The runtime's functions that a kernel calls, by way of cuda.hpp and of the meanings of PTX instructions.
#pragma once
struct uint3;
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    dim3(const uint3& v);            // cuda.hpp
    operator uint3() const;
};

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
int block_count(bool vote, int line);                 // a block barrier: of how many threads `vote` is true
void warp_barrier(int line, unsigned mask);
unsigned active_mask(int line);                       // the lanes that come to this line before any other lane of the warp can run
void thread_fence();                                  // order.cpp

// All lanes named by `mask` come here with `in`; the last one to arrive runs `combine` once for the warp; each leaves with `out`.
// lanes[i] are the arguments of lane i, null where it takes no part.
struct Lane { const void* in; void* out; };
using Combine = void (*)(Lane (&lanes)[32], int line);
void stop_kernel(const char* text, int line);         // of the kernel's own will
void read_of_no_lane(int line);                       // for a Combine: by a lane that reads another one, which takes no part
void warp_collective(const char* what, int line, unsigned mask, const void* in, void* out, Combine combine);

// --- shared memory (memory.cpp)

unsigned char* dynamic_shared();
unsigned shared_address(const void* pointer);       // in the 32-bit window that PTX uses
void* shared_pointer(unsigned address);
void wait_for_kernels_before();                      // of a kernel that a GPU may start while they run
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

unsigned named_barrier(unsigned id, unsigned threads, bool waits, int line, bool vote = false);  // the number of votes, if it waits
void set_registers(bool take, unsigned registers, int line);

// --- tensor copies (tma.cpp); of five coordinates those past the tensor's rank are 0

struct Coordinates { int at[5]; };
void tma_load(int rank, unsigned to, const void* map, Coordinates coordinates, unsigned barrier, int line);
void bulk_load(unsigned to, const void* from, unsigned bytes, unsigned barrier, int line);  // of consecutive bytes
void tma_store(int rank, const void* map, Coordinates coordinates, unsigned from, int line);
void tma_store_commit();
void tma_store_wait(int pending, bool only_read);

// --- products of a warpgroup (wgmma.cpp)

struct Wgmma {
    int columns, bytes;             // N, and bytes of an element of A and B
    float* d;                       // of this thread: columns / 2 registers
    bool a_in_registers;
    unsigned a_registers[4];
    unsigned long long a, b;        // descriptors
    bool accumulate, a_transposed, b_transposed;
    float (*to_float)(unsigned short);   // of the bits of an element
};
void wgmma_fence();
void wgmma_issue(const Wgmma& product, int line);
void wgmma_commit(int line);
void wgmma_wait(int pending, int line);

// --- products of a warp (wgmma.cpp): sums in fp32, in the order of k

void multiply_16x8x16(const float (&a)[16][16], const float (&b)[16][8], float (&d)[16][8]);

// --- atomic updates (memory.cpp)

// Calls `update` with a copy of the value and with `with`, and stores what it leaves. `counts`: global memory may be 0 from the start.
void atomic_update(void* address, int bytes, bool counts, void (*update)(void* value, void* with), void* with, int line);
void global_add(float* address, const float* by, int count, int line);

// --- counting

void count_instruction(int which);

template <typename T> inline T shuffle(int line, unsigned mask, T value, int source) {
    struct In { T value; int source; } in{value, source};
    T out;
    warp_collective("shuffle", line, mask, &in, &out, [](Lane (&lanes)[32], int line) {
        for (auto& lane : lanes) {
            if (!lane.in) continue;
            const Lane& from = lanes[((const In*)lane.in)->source & 31];
            if (!from.in) read_of_no_lane(line);
            *(T*)lane.out = ((const In*)from.in)->value;
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

// The values of all lanes that `mask` names and the block has: bit i of `lanes` is set if it has lane i.
template <typename T> struct Gathered { T of[32]; unsigned lanes; };
template <typename T> inline Gathered<T> gather(int line, unsigned mask, T value) {
    Gathered<T> out;
    warp_collective("vote or reduction", line, mask, &value, &out, [](Lane (&lanes)[32], int) {
        for (auto& lane : lanes) {
            if (!lane.in) continue;
            auto& out = *(Gathered<T>*)lane.out;
            out.lanes = 0;
            for (int i = 0; i < 32; ++i)
                if (lanes[i].in) out.of[i] = *(const T*)lanes[i].in, out.lanes |= 1u << i;
        }
    });
    return out;
}

}  // namespace emulator
