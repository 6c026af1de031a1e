// Dot products: the score of each key, which is how much a query resembles it.
//
//     s[i] = scale * (q[0] * k[i][0] + q[1] * k[i][1] + ... + q[7] * k[i][7])
//
// q        one query, 8 numbers
// k        n keys of 8 numbers, one key after another
// s        n scores, written by this kernel
//
// Launch: ceil(n / 128) blocks of 128 threads, one thread for each key. n need not be a multiple of 128.
// q and k are at addresses that are multiples of 16.
// float4 is CUDA's struct of four floats, x, y, z and w: a pointer cast to const float4* loads 16 bytes at a time, from an address that
// is a multiple of 16. A sector is 32 bytes of global memory, and the least that memory moves.
constexpr int D = 8;

extern "C" __global__ void dot_product(const float* q, const float* k, float* s, int n, float scale) {
    // your code
}
