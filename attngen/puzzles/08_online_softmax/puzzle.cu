// Online softmax: the maximum and the sum in one pass, over a row of any length.
//
//     p[r][c] = exp(s[r][c] - m[r]) / l[r]        m and l as in the puzzle before
//
// A pair (m, l) describes the scores seen so far: their maximum, and their sum of exp(score - m). A new score x changes it to
//
//     m' = max(m, x)        l' = l * exp(m - m') + exp(x - m')
//
// and two pairs, of two sets of scores, join in the same way. This is what lets a fused kernel see a row tile by tile.
//
// s        rows of `columns` scores
// p        rows of `columns` weights, written by this kernel
//
// Launch: one block of 32 threads for each row: one warp. `columns` is at least 1, and may be less than 32. There is no shared memory.
// CUDA has expf(x), fmaxf(x, y), __shfl_xor_sync(0xffffffff, value, m), and INFINITY.
#define INFINITY __int_as_float(0x7f800000)

extern "C" __global__ void online_softmax(const float* s, float* p, int columns) {
    // your code
}
