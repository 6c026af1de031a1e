// A pipeline with mbarriers: thread 0 copies tiles ahead, and all threads, thread 0 too, wait for exactly the tile that they add.
//
//     y[i] = x[0][i] + x[1][i] + ... + x[tiles - 1][i]        for i = 0, ..., 511
//
// x        tiles x 512 numbers, one tile after another, at an address that is a multiple of 16
// y        512 numbers, written by this kernel
//
// Launch: one block of 128 threads. tiles is at least 1.
// Shared memory: two buffers, and for each an mbarrier that says that it is full, and one that says that it is empty.
// A phase has a parity, not a number, so that a waiting thread must not be two phases behind: a buffer is filled again only when all
// threads have waited for its previous contents.
// bulk_load copies a tile with one instruction of one thread; its bytes count at an mbarrier, which must expect them.

#include "mbarrier.cuh"
#include "mbarrier_arrive.cuh"
#include "mbarrier_wait.cuh"
#include "mbarrier_init_fence.cuh"
#include "bulk_load.cuh"
constexpr int TILE = 512, BYTES = 4 * TILE, STAGES = 2, THREADS = 128;

extern "C" __global__ void mbarrier_pipeline(const float* x, float* y, int tiles) {
    __shared__ alignas(16) float buffer[STAGES][TILE];
    __shared__ unsigned long long full[STAGES], empty[STAGES];
    // your code
}
