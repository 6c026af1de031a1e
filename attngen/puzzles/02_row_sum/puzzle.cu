// Row sums: the threads of a block share their work.
//
//     y[r] = x[r][0] + x[r][1] + ... + x[r][columns - 1]
//
// x        rows of `columns` numbers, one row after another
// y        one sum for each row, written by this kernel
//
// Launch: one block of 128 threads for each row. `columns` is at least 1, and need not be a multiple of 128.
// Shared memory: `partial` has a number for each thread of the block. All threads can write and read it. It serves a warp in
// wavefronts: 32 neighbouring numbers are one, and so is a number that one thread reads alone.
constexpr int THREADS = 128;

extern "C" __global__ void row_sum(const float* x, float* y, int columns) {
    __shared__ float partial[THREADS];
    // your code
}
