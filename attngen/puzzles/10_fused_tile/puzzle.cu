// A fused tile: 16 rows of a block read the same keys and values, once from global memory.
//
//     o = softmax(q k^T * SCALE) v        as in the puzzle before
//
// q, o     rows x 32 numbers; o is written by this kernel
// k, v     keys x 32 numbers, at least one key
//
// Launch: ceil(rows / 16) blocks of 128 threads: four warps, four rows for each. Neither rows nor keys need be multiples of
// anything: what lies past the end must not be read.
// Shared memory is yours to declare.
constexpr int D = 32, ROWS = 16, KEYS = 32, WARPS = 4;  // KEYS: of a tile
constexpr float SCALE = 0.17677669f;                   // 1 / sqrt(32)
#define INFINITY __int_as_float(0x7f800000)

extern "C" __global__ void fused_tile(const float* q, const float* k, const float* v, float* o, int rows, int keys) {
    // your code
}
