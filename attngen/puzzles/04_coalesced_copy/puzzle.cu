// A copy of a part of a matrix: neighbouring lanes must touch neighbouring memory.
//
//     y[r][c] = x[r][c]        for rows r = 0, ..., rows - 1 and columns c = 0, ..., 63
//
// x        rows of `stride` numbers, of which the first 64 are copied
// y        rows of 64 numbers, written by this kernel
//
// Launch: ceil(rows / 16) blocks of 128 threads. Each block copies 16 rows. rows need not be a multiple of 16.
// stride is a multiple of 4; x and y are at addresses that are multiples of 16.
constexpr int COLUMNS = 64, ROWS = 16, THREADS = 128;

extern "C" __global__ void coalesced_copy(const float* x, float* y, int rows, int stride) {
    // your code
}
