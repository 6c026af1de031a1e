// As ldmatrix_x4, each matrix transposed.
//: The sums of P V run over keys, which are rows of V in memory, where those of Q K^T run over columns. So V is needed
//: transposed; ldmatrix transposes it while loading, at no cost.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row_smem) {
    const unsigned row = (unsigned)__cvta_generic_to_shared(row_smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
