// D += A B for one warp: A is 16x16 (rows x k), B is 16x8 (k x columns), D is 16x8 in fp32.
//   a[0..3]: A[lane / 4 + 8 * (i % 2)][2 * (lane % 4) + 8 * (i / 2)] and the next column
//   b[0..1]: B[2 * (lane % 4) + 8 * i][lane / 4] and the next row
//   upper[0..1], lower[0..1]: D[lane / 4][2 * (lane % 4) + i] and the same 8 rows further
//: 2048 multiply-adds for a warp. A product of tiles is made of many, and the D of one is the D of the next: sums stay in
//: registers. The hardware defines the layout. Two things follow for this kernel: a row of D is in four neighbouring lanes, so
//: that its maximum takes two shuffles; and two neighbouring D, rounded to 16 bits, are an A operand: P does not go through
//: memory.
__device__ __forceinline__ void mma_16x8x16(float* upper, float* lower, const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
        : "+f"(upper[0]), "+f"(upper[1]), "+f"(lower[0]), "+f"(lower[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
