// A transposition: both the reads and the writes of global memory coalesced, and no bank conflict between them.
//
//     y[c][r] = x[r][c]
//
// x        rows x columns numbers, row by row
// y        columns x rows numbers, row by row, written by this kernel
//
// Launch: a grid of columns / 32 by rows / 32 blocks of 32 x 8 threads. Block (bx, by) transposes the 32 x 32 tile of x whose first
// column is 32 * bx and whose first row is 32 * by. rows and columns are multiples of 32.
// Shared memory is yours to declare. It has 32 banks of 4 bytes: a number at index i of a float array is in bank i % 32.
constexpr int TILE = 32, ROWS = 8;

extern "C" __global__ void transposition(const float* x, float* y, int rows, int columns) {
    // your code
}
