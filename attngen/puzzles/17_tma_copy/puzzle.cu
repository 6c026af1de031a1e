// A TMA copy: one instruction brings a tile of a matrix, swizzled, so that rows and columns of 16 bytes can be read without bank conflicts.
//
//     y[c][r] = x[r][c]
//
// x        rows x columns numbers in fp16; the kernel has a tensor map of it, in boxes of 64 rows x 64 columns
// y        columns x rows numbers in fp16, written by this kernel
//
// Launch: a grid of columns / 64 by ceil(rows / 64) blocks of 128 threads. Block (bx, by) transposes the tile whose first column
// is 64 * bx and whose first row is 64 * by. columns is a multiple of 64. What TMA reads past the last row is 0.
// The coordinates of tma_load are (column, row, 0, 0); its last argument is L2_EVICT_FIRST or L2_EVICT_LAST.
//
// The swizzle: a row of the tile is 128 bytes, eight chunks of eight numbers. Chunk c of row r lies at the place of chunk
// c ^ (r % 8) of that row. The tile must begin at a multiple of 1024 bytes.

#include "type_fp16.cuh"
#include "mbarrier.cuh"
#include "mbarrier_wait.cuh"
#include "mbarrier_init_fence.cuh"
#include "tma_load.cuh"
constexpr int TILE = 64, BYTES = 2 * TILE * TILE, THREADS = 128;

extern "C" __global__ void tma_copy(const __grid_constant__ TensorMap x, fp16* y, int rows, int columns) {
    __shared__ alignas(1024) fp16 tile[TILE][TILE];
    __shared__ unsigned long long full;
    // your code
}
