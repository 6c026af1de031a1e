// Stores four 8x8 matrices of 16-bit elements to shared memory: lane i gives the address of a row (row i % 8 of matrix i / 8)
// and, of each matrix, elements [lane / 4][2 * (lane % 4)] and the next one.
//: The reverse of ldmatrix. A lane has pairs of elements of a row and would store 4 bytes at a time; stmatrix collects the 16
//: bytes of a row from four lanes and stores them at once.
__device__ __forceinline__ void stmatrix_x4(void* row_smem, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned row = (unsigned)__cvta_generic_to_shared(row_smem);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
