// Double buffering: while a block works on a tile, the next one is copied in the background.
//
//     s[j] = q[0] * k[j][0] + ... + q[31] * k[j][31]
//
// q        one query, 32 numbers
// k        n keys of 32 numbers
// s        n scores, written by this kernel
//
// Launch: one block of 128 threads for all keys, which are 128 to a tile. n need not be a multiple of 128. q and k are at addresses that
// are multiples of 16.
// Shared memory is yours to declare; a row that cp_async_16 writes must begin at a multiple of 16 bytes.
// cp_async_wait covers the copies of its own thread: a barrier must follow before other threads read what they brought.
// With one buffer, a tile needs two barriers: its copies have arrived, and all threads have read it. With two buffers, one is
// enough.

#include "cp_async.cuh"
constexpr int D = 32, TILE = 128, THREADS = 128;

extern "C" __global__ void double_buffering(const float* q, const float* k, float* s, int n) {
    // your code
}
