// A sum over a warp, without shared memory: threads of a warp read each other's registers.
//
//     y[r] = x[r][0] + x[r][1] + ... + x[r][columns - 1]
//
// x        rows of `columns` numbers, one row after another
// y        one sum for each row, written by this kernel
//
// Launch: ceil(rows / 4) blocks of 128 threads: four warps, each of which has a row. rows need not be a multiple of 4.
// A shuffle, `__shfl_xor_sync(0xffffffff, value, m)`, gives a lane the `value` of the lane whose number differs in the bits of m.
// All 32 lanes must call it.
constexpr int WARPS = 4;

extern "C" __global__ void warp_reduction(const float* x, float* y, int rows, int columns) {
    // your code
}
