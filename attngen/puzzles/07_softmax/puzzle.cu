// Softmax in three passes: the weights of the keys, which are positive and add up to 1.
//
//     p[r][c] = exp(s[r][c] - m[r]) / l[r]
//     m[r] = the largest of s[r][0], ..., s[r][columns - 1]
//     l[r] = exp(s[r][0] - m[r]) + ... + exp(s[r][columns - 1] - m[r])
//
// The maximum is subtracted so that no exp overflows: exp(100) is larger than every fp32.
//
// s        rows of `columns` scores
// p        rows of `columns` weights, written by this kernel
//
// Launch: one block of 128 threads for each row. `columns` is 1 to 1024.
// Shared memory: a number for each thread, and one for each score.
// CUDA has expf(x), fmaxf(x, y), and INFINITY.
constexpr int THREADS = 128, MOST = 1024;
#define INFINITY __int_as_float(0x7f800000)

extern "C" __global__ void softmax(const float* s, float* p, int columns) {
    __shared__ float partial[THREADS], row[MOST];
    // your code
}
