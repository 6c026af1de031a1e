// Loads four 8x8 matrices of 16-bit elements from shared memory: lane i gives the address of a row (row i % 8 of matrix i / 8)
// and receives, of each matrix, elements [lane / 4][2 * (lane % 4)] and the next one.
//: In a fragment a lane has two neighbours of a row; the next two are the next lane's. Ordinary loads would bring 4 bytes
//: to a lane at a time. ldmatrix reads rows of 16 bytes and distributes them to the lanes: 512 bytes in 4 steps of 128, if the
//: eight rows of each matrix lie in different banks.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row_smem) {
    const unsigned row = (unsigned)__cvta_generic_to_shared(row_smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
