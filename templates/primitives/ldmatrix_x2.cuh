// Two matrices, transposed; the addresses of lanes 16 to 31 are not used.
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], const void* row_smem) {
    const unsigned row = (unsigned)__cvta_generic_to_shared(row_smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 { %0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(row)
                 : "memory");
}
