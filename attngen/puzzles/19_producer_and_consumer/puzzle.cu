// Producer and consumer: one warp copies tiles of keys, a warpgroup multiplies, and mbarriers are all that connects them.
//
//     s[i][j] = q[i][0] * k[j][0] + ... + q[i][63] * k[j][63]
//
// q        64 rows of 64 numbers in fp16, of which the kernel has a tensor map
// k        keys x 64 numbers in fp16, of which it has a tensor map in boxes of 64 rows
// s        64 x keys numbers in fp32, written by this kernel
//
// Launch: one block of 160 threads. Threads 0 to 127 are the consumer, a warpgroup; threads 128 to 159 the producer, of which one
// thread issues the copies. keys is a multiple of 64, and at least 64.
// Shared memory: q, a ring of two tiles of keys, and mbarriers: one for q, and for each tile of the ring full and empty.
// The coordinates of tma_load are (column, row, 0, 0), and tiles are K-major, both as in the puzzle before.

#include "type_fp16.cuh"
#include "mbarrier.cuh"
#include "mbarrier_arrive.cuh"
#include "mbarrier_wait.cuh"
#include "mbarrier_init_fence.cuh"
#include "tma_load.cuh"
#include "wgmma.cuh"
#include "products.cuh"
constexpr int D = 64, TILE = 64, BYTES = 2 * TILE * D, STAGES = 2, CONSUMERS = 128, THREADS = 160;

extern "C" __global__ void __launch_bounds__(THREADS)
producer_and_consumer(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, float* s, int keys) {
    __shared__ alignas(1024) fp16 q_tile[TILE][D], k_tile[STAGES][TILE][D];
    __shared__ unsigned long long q_full, full[STAGES], empty[STAGES];
    // your code
}
