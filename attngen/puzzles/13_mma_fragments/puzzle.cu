// Fragments of mma: a warp multiplies 16 x 16 by 16 x 8 with one instruction, and each lane has some elements of each matrix.
//
//     s[i][j] = q[i][0] * k[j][0] + ... + q[i][d - 1] * k[j][d - 1]
//
// q        rows x d numbers in fp16
// k        keys x d numbers in fp16
// s        rows x keys numbers in fp32, written by this kernel
//
// Launch: a grid of keys / 8 by rows / 16 blocks of 32 threads. Block (x, y) computes rows 16 * y to 16 * y + 15, keys 8 * x to
// 8 * x + 7. d is a multiple of 16, rows of 16, keys of 8; all arrays are at addresses that are multiples of 16.
// Sums are in fp32: in fp16 a sum of ones would stop growing at 2048. An mma adds to D, so that one D collects all products over d.
// In mma_16x8x16, A is rows of q, B is keys: B[c][j] = k[j][c]. Which elements a lane has is said above it.

#include "type_fp16.cuh"
#include "mma_fp16.cuh"

extern "C" __global__ void mma_fragments(const fp16* q, const fp16* k, float* s, int keys, int d) {
    // your code
}
