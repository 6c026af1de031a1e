// Split keys: one row and many keys, as when a model writes a token. Blocks share the keys, so that all multiprocessors work.
//
// Block b sees keys b * split to min(keys, (b + 1) * split) - 1, which are its part. It writes the output of the row as if there
// were no other keys, and the log of the sum by which it has divided:
//
//     s[j]          = (q . k[j]) * SCALE
//     lse[b]        = log(exp(s[j]) + ...)                    over the keys j of its part
//     o_part[b][c]  = exp(s[j] - lse[b]) * v[j][c] + ...      over the keys j of its part
//
// q        32 numbers
// k, v     keys x 32 numbers
// o_part   ceil(keys / split) x 32 numbers, written by this kernel
// lse      ceil(keys / split) numbers, written by this kernel
//
// Launch: ceil(keys / split) blocks of 128 threads. split is a multiple of 32; the last part may be shorter, and has at least one key.
// Shared memory is yours to declare. Do not forget the maximum: exp(s) alone may overflow.
constexpr int D = 32, WARPS = 4;
constexpr float SCALE = 0.17677669f;  // 1 / sqrt(32)
#define INFINITY __int_as_float(0x7f800000)

extern "C" __global__ void split_keys(const float* q, const float* k, const float* v, float* o_part, float* lse, int keys,
                                      int split) {
    // your code
}
