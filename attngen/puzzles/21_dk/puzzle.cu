// dK: a key collects from each row how much its score should change, times the query of the row.
//
//     p[r][j]  = exp(s[r][j] - lse[r])                    s[r][j] = (q[r] . k[j]) * SCALE
//     ds[r][j] = p[r][j] * (d_o[r] . v[j] - delta[r])
//     dk[j][c] = (ds[0][j] * q[0][c] + ... + ds[n - 1][j] * q[n - 1][c]) * SCALE
//
// q, k, v, d_o     n x 32 numbers; d_o is the gradient of the output
// lse, delta       n numbers
// dk               n x 32 numbers, written by this kernel
//
// Launch: ceil(n / 16) blocks of 128 threads: block b has keys 16 * b to 16 * b + 15, and reads all rows, in tiles of 32. n need not be
// a multiple of anything. Begin with your kernel of the puzzle before.
constexpr int D = 32, KEYS = 16, ROWS = 32, WARPS = 4;  // ROWS: of a tile
constexpr float SCALE = 0.17677669f;                   // 1 / sqrt(32)
#define INFINITY __int_as_float(0x7f800000)

extern "C" __global__ void gradient_of_k(const float* q, const float* k, const float* v, const float* d_o, const float* lse,
                                         const float* delta, float* dk, int n) {
    // your code
}
