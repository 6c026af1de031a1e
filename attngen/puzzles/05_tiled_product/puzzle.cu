// A product of matrices: what several threads need is read from global memory once, and then shared.
//
//     c[i][j] = a[i][0] * b[0][j] + a[i][1] * b[1][j] + ... + a[i][n - 1] * b[n - 1][j]
//
// a, b     n x n numbers, row by row
// c        n x n numbers, written by this kernel
//
// Launch: a grid of n / 32 by n / 32 blocks of 32 x 8 threads. Block (x, y) computes the 32 x 32 tile of c whose first column is
// 32 * blockIdx.x and whose first row is 32 * blockIdx.y. n is a multiple of 32.
// Shared memory: a tile of a, and one of b. The sums run over n / 32 pairs of tiles.
constexpr int TILE = 32, ROWS = 8;

extern "C" __global__ void tiled_product(const float* a, const float* b, float* c, int n) {
    __shared__ float a_tile[TILE][TILE], b_tile[TILE][TILE];
    // your code
}
