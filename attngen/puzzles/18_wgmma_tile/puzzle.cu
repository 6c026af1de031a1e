// A wgmma tile: a warpgroup of 128 threads multiplies 64 x 16 by 16 x 64 with one instruction, both from shared memory.
//
//     s[i][j] = q[i][0] * k[j][0] + ... + q[i][63] * k[j][63]
//
// q        rows x 64 numbers in fp16, of which the kernel has a tensor map in boxes of 64 rows
// k        keys x 64 numbers in fp16, likewise
// s        rows x keys numbers in fp32, written by this kernel
//
// Launch: a grid of keys / 64 by rows / 64 blocks of 128 threads. Block (x, y) computes the tile of rows 64 * y to 64 * y + 63 and
// keys 64 * x to 64 * x + 63. rows and keys are multiples of 64.
// The coordinates of tma_load are (column, row, 0, 0). It brings tiles with the swizzle that wgmma expects.
// wgmma reads both operands from shared memory: no ldmatrix is needed.
// A product sums over its dimension K, here the 64 columns. An operand is K-major if neighbours in K are neighbours in memory,
// and MN-major if neighbours of the other dimension are. Both tiles are K-major: a row of a tile is a row of q, or a key.

#include "type_fp16.cuh"
#include "mbarrier.cuh"
#include "mbarrier_wait.cuh"
#include "mbarrier_init_fence.cuh"
#include "tma_load.cuh"
#include "wgmma.cuh"
#include "products.cuh"
constexpr int D = 64, TILE = 64, BYTES = 2 * TILE * D, THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
wgmma_tile(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, float* s, int keys) {
    __shared__ alignas(1024) fp16 q_tile[TILE][D], k_tile[TILE][D];
    __shared__ unsigned long long full;
    // your code
}
