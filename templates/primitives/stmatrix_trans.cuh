// stmatrix_x4, each matrix transposed: of each matrix, a lane gives elements [2 * (lane % 4)][lane / 4] and the one below.
//: The fragments of dS^T are stored as rows of dS.
__device__ __forceinline__ void stmatrix_x4_trans(void* row_smem, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned row = (unsigned)__cvta_generic_to_shared(row_smem);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
