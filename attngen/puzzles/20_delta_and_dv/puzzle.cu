// Delta and dV: the first part of a backward. The gradient of a value collects from all rows what they took of it.
//
//     p[r][j]  = exp(s[r][j] - lse[r])        s[r][j] = (q[r] . k[j]) * SCALE
//     delta[r] = do[r][0] * o[r][0] + ... + do[r][31] * o[r][31]
//     dv[j][c] = p[0][j] * do[0][c] + ... + p[n - 1][j] * do[n - 1][c]
//
// The forward has kept lse, the log of each row's sum, so that a weight can be computed alone.
//
// q, k     n x 32 numbers
// o        n x 32 numbers, the output of the forward
// d_o      n x 32 numbers, the gradient of o: do in the formulas, which is a keyword of C++
// lse      n numbers
// delta    n numbers, written by this kernel
// dv       n x 32 numbers, written by this kernel
//
// Launch: ceil(n / 16) blocks of 128 threads: block b has keys 16 * b to 16 * b + 15, and writes delta of the same rows. A block
// reads all rows, in tiles of 32. n need not be a multiple of anything.
// Shared memory is yours to declare. A byte that several lanes read counts for each of them: a number of lse that all lanes of a
// warp read is 128 bytes.
constexpr int D = 32, KEYS = 16, ROWS = 32, WARPS = 4;  // ROWS: of a tile
constexpr float SCALE = 0.17677669f;                   // 1 / sqrt(32)
#define INFINITY __int_as_float(0x7f800000)

extern "C" __global__ void delta_and_dv(const float* q, const float* k, const float* o, const float* d_o, const float* lse,
                                        float* delta, float* dv, int n) {
    // your code
}
