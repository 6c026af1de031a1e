// A causal bound: row r sees keys 0, ..., r. Tiles of keys that no row of a block sees are not loaded.
//
//     o = softmax(q k^T * SCALE, where key j <= row r) v
//
// q, o     n x 32 numbers; o is written by this kernel
// k, v     n x 32 numbers
//
// Launch: ceil(n / 16) blocks of 128 threads: four warps, four rows for each. n need not be a multiple of anything.
// Begin with your kernel of the puzzle before. Shared memory is yours to declare.
constexpr int D = 32, ROWS = 16, KEYS = 32, WARPS = 4;  // KEYS: of a tile
constexpr float SCALE = 0.17677669f;                   // 1 / sqrt(32)
#define INFINITY __int_as_float(0x7f800000)

extern "C" __global__ void causal_bound(const float* q, const float* k, const float* v, float* o, int n) {
    // your code
}
