// ldmatrix: fragments from shared memory, 512 bytes with one instruction of a warp, and no bank conflict.
//
//     s[i][j] = q[i][0] * k[j][0] + ... + q[i][63] * k[j][63]
//
// q        rows x 64 numbers in fp16
// k        keys x 64 numbers in fp16
// s        rows x keys numbers in fp32, written by this kernel
//
// Launch: a grid of keys / 64 by rows / 64 blocks of 128 threads. Block (x, y) computes a tile of 64 rows and 64 keys, each of its
// four warps 16 rows. rows and keys are multiples of 64; all arrays are at addresses that are multiples of 16.
// Ordinary loads bring 4 bytes of a fragment to a lane at a time. ldmatrix reads rows of 16 bytes and distributes them over the lanes,
// without a bank conflict if the eight rows of each 8x8 matrix lie in different banks.
// Shared memory is yours to declare, alignas(16). Each row of it that a lane gives to ldmatrix must begin at a multiple of 16 bytes.

#include "type_fp16.cuh"
#include "ldmatrix.cuh"
#include "mma_fp16.cuh"
constexpr int D = 64, TILE = 64, THREADS = 128;

extern "C" __global__ void ldmatrix(const fp16* q, const fp16* k, float* s, int keys) {
    // your code
}
