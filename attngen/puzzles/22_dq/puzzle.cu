// dQ: a row collects from each key how much its score should change, times the key. The same ds as for dK, by rows.
//
//     p[r][j]  = exp(s[r][j] - lse[r])                    s[r][j] = (q[r] . k[j]) * SCALE
//     ds[r][j] = p[r][j] * (d_o[r] . v[j] - delta[r])
//     dq[r][c] = (ds[r][0] * k[0][c] + ... + ds[r][n - 1] * k[n - 1][c]) * SCALE
//
// q, k, v, d_o     n x 32 numbers; d_o is the gradient of the output
// lse, delta       n numbers
// dq               n x 32 numbers, written by this kernel
//
// The mask is causal: row r sees keys 0, ..., r, and only these have a p.
//
// Launch: ceil(n / 16) blocks of 128 threads: block b has rows 16 * b to 16 * b + 15, and reads the keys that they see, in tiles of 32.
// n need not be a multiple of anything.
constexpr int D = 32, ROWS = 16, KEYS = 32, WARPS = 4;  // KEYS: of a tile
constexpr float SCALE = 0.17677669f;                   // 1 / sqrt(32)
#define INFINITY __int_as_float(0x7f800000)

extern "C" __global__ void gradient_of_q(const float* q, const float* k, const float* v, const float* d_o, const float* lse,
                                         const float* delta, float* dq, int n) {
    // your code
}
