// A fused row: scores, softmax and output of a query in one kernel. No score is ever in memory.
//
//     s[j] = (q[r][0] * k[j][0] + ... + q[r][31] * k[j][31]) * SCALE
//     o[r][c] = (exp(s[0] - m) * v[0][c] + ... + exp(s[keys - 1] - m) * v[keys - 1][c]) / l
//
// with m and l of the softmax of s. Scores may be far from 0: exp(s[j]) may overflow, or be 0 for every key.
//
// q, o     rows x 32 numbers; o is written by this kernel
// k, v     keys x 32 numbers, at least one key
//
// Launch: ceil(rows / 4) blocks of 128 threads: four warps, a row for each. rows need not be a multiple of 4.
// A byte that several lanes read counts for each of them: a number that all lanes of a warp read is 128 bytes.
constexpr int D = 32, WARPS = 4;
constexpr float SCALE = 0.17677669f;  // 1 / sqrt(32)
#define INFINITY __int_as_float(0x7f800000)

extern "C" __global__ void fused_row(const float* q, const float* k, const float* v, float* o, int rows, int keys) {
    // your code
}
