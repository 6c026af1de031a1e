// gpt2, hopper, backward
// ======================
//
//     attention gpt2 {
//         dtype     fp16
//         head_dim  64
//         scale     0.125
//         mask      q >= k
//     }
//
// For batch b, query head h and query row q, with the key/value head h / group_size:
//
//     s    = 0.125 * sum over d of Q[q, d] * K[k, d]
//     S[k] = s where q >= k, else -inf
//     P[k] = exp(S[k]) / (sum over k of exp(S[k]))
//     dP[k] = (sum over d of dO[q, d] * V[k, d]) where q >= k, else 0
//     delta = sum over k of P[k] * dP[k]
//     dS[k] = P[k] * (dP[k] - delta)
//     dQ[d] = 0.125 * sum over k of dS[k] * K[k, d]
//     and for each key k of a key/value head, over the rows q of the query heads that share it:
//         dK[d] = 0.125 * sum over h, q of dS[q, k] * Q[q, d]
//         dV[d] = sum over h, q of P[q, k] * dO[q, d]
//
// Shapes
//     Q    fp16 [batch, q_heads, q_len, 64]
//     K    fp16 [batch, kv_heads, kv_len, 64]
//     V    fp16 [batch, kv_heads, kv_len, 64]
//     O    fp16 [batch, q_heads, q_len, 64]
//     lse  fp32 [batch, q_heads, q_len]
//     lse_rest fp32 [batch, q_heads, q_len]
//     dO   fp16 [batch, q_heads, q_len, 64]
//     dQ   fp16 [batch, q_heads, q_len, 64], written
//     dK   fp16 [batch, kv_heads, kv_len, 64], written
//     dV   fp16 [batch, kv_heads, kv_len, 64], written
//     row_numbers fp32 [batch, q_heads, ceil(q_len / 128), 2, 3, 64], workspace
//     part_sums fp32 [(parts > 1), batch, kv_heads, ceil(kv_len / 128), parts, 128, 128], workspace
//     next_work int32 [1], counter
//
// Plan, for sm_90a (Hopper: H100, H200)
//     gradients = q, k, v: other gradients are not computed
//     dK and dV, dQ = by two kernels: both compute S and dP, seven products instead of five; one kernel would have
//         to add dQ in global memory
//     deterministic = yes: each sum belongs to one block and has a fixed order: no atomics, the same bits in every
//         run
//     query heads of a group = over several work tiles if there are few: their sums of dK and dV are added in a
//         fixed order by a kernel; a call with enough work tiles does not launch it
//     weights = recomputed: from scores and the lse of their row, which the forward has saved: O(q_len) bytes
//     lse = lse + lse_rest: one fp32 number cannot hold a large maximum and the logarithm of a sum beside it
//     lse and delta = stored together by tiles: one copy in the background brings those of a tile
//     NaN and infinity in partial tiles = left out: wgmma multiplies whole tiles, and 0, the weight of an excluded
//         pair, times NaN is NaN
//     warpgroups = 1 + 2: one copies; 2 compute for 64 keys, or rows, each
//     keys and rows = 128 held, 64 visited at a time: S, dP and the sums of 64 keys fit the registers of a warpgroup
//     keys of a block = in registers: operands of S and dP that stay for all tiles; from shared memory, each product
//         would read them again
//     stages = 3: later tiles are copied while one is used
//     registers = 40 and 232 a thread: copying needs few; sums, S and dP need many
//     next scores = during the sums: Q K^T of the next tile runs together with the products of the sums of this one
//     blocks = one for each SM: persistent kernels: a block takes work tiles from a counter, the longest first
//     swizzle = 128 bytes: tiles in slabs of 64 columns, chunks of 16 bytes permuted: neither TMA nor wgmma meets a
//         bank conflict
//     heads numbered together = by length: as many key/value heads as fit 32 MiB of L2, 32 to 128
//
// Shared memory of a block, 101336 bytes
//          0  HELD_QK  fp16 [1][128][64], the keys that the block holds, or the rows of Q
//      16384  HELD_V   fp16 [1][128][64], the values that the block holds, or the rows of dO
//      32768  VISITED_QK fp16 [3][1][64][64], 3 tiles of Q, or of keys
//      57344  VISITED_V fp16 [3][1][64][64], 3 tiles of dO, or of values
//      81920  OUT      fp16 [8][1][16][64], rows of a gradient of each warp, on their way to global memory
//      98304  ROW_NUMBERS float [3][3][64], numbers of the rows of each stage
//     100608  BARRIERS mbarrier [13], see the kernels
//     100736  VISITS   int [150], two work tiles, the tiles that were found, and that of each stage
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. This variant's score and mask
//     4. Which tiles are visited
//     5. Delta, and lse in powers of 2
//     6. Tiles in shared memory
//     7. What both kernels share
//     8. Gradients of keys and values
//     9. Gradients of keys and values from those of parts of a group
//     10. Gradients of queries

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;
constexpr float softmax_scale = 0.125f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float EXPONENT_SCALE = softmax_scale * LOG2_E;  // exp(softmax_scale x) = 2^(EXPONENT_SCALE x)
constexpr int BLOCK_Q = 64;  // query rows of a block
constexpr int BLOCK_KV = 64;  // keys of a tile
constexpr int THREADS = 384;
constexpr int HELD_QK_SMEM = 0;
constexpr int HELD_V_SMEM = 16384;
constexpr int VISITED_QK_SMEM = 32768;
constexpr int VISITED_V_SMEM = 57344;
constexpr int OUT_SMEM = 81920;
constexpr int ROW_NUMBERS_SMEM = 98304;
constexpr int BARRIERS_SMEM = 100608;
constexpr int VISITS_SMEM = 100736;
constexpr float LARGE = 65536.0f;  // above this magnitude, fp32 rounds maximum * EXPONENT_SCALE too coarsely
constexpr float NOT_A_NUMBER = __builtin_bit_cast(float, 0x7fffffff);
constexpr int STAGES = 3;  // tiles to visit in shared memory
constexpr int CONSUMERS = 2;  // warpgroups that multiply, for 64 rows, or keys, each
constexpr int WARPGROUP_ROWS = 64;
constexpr int BLOCK_ROWS = CONSUMERS * WARPGROUP_ROWS;  // that a block holds: keys, or rows
constexpr int RELEASES = 128 * CONSUMERS;  // of a tile: each thread of a consumer
constexpr int ROW_BYTES = 128;  // a row of a slab: 64 columns of a tile
constexpr int QK_SLABS = 1;
constexpr int V_SLABS = 1;
constexpr int OUTPUT_SLABS = 1;  // the larger of both
constexpr int K_STEPS = HEAD_DIM / 16;  // steps of 16 over the head size
constexpr int V_STEPS = HEAD_DIM_V / 16;
constexpr int DELTA_THREADS = 512;
constexpr int ROW_LANES = 8;  // that share a row of O and dO
constexpr int DELTA_ROWS = 2;  // of a thread

// 2. Primitives

// fp16: 1 sign, 5 exponent, 10 fraction bits.
struct fp16 { unsigned short bits; };

// Two neighbouring elements of a fragment in one register, `low` in the lower half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// The two elements that pack() joined, as fp32.
__device__ __forceinline__ float low_of(unsigned packed) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)(packed & 0xffff)));
    return y;
}
__device__ __forceinline__ float high_of(unsigned packed) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)(packed >> 16)));
    return y;
}

// 2^x on the special function unit; a denormal counts as 0. Relative error at most 2^-22 (PTX ISA, ex2.approx).
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// threadIdx.x, read again at each call: what was computed from an earlier call need not stay in a register.
__device__ __forceinline__ unsigned thread_index() {
    unsigned index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// x, passed through an empty asm statement: values derived from it are computed again instead of kept in registers.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// A mask of the elements of a pair that are infinite or NaN: their exponents are all ones, and adding 1 carries into the sign.
__device__ __forceinline__ unsigned not_finite(unsigned packed) {
    return (((packed & 0x7c007c00) + 0x04000400) >> 15 & 0x00010001) * 0xffff;
}

// An mbarrier: eight bytes of shared memory that count, in phases, threads that arrive and bytes that copies bring. A phase
// completes when `arrivals` threads have arrived and all bytes that they announced have come; then the next one begins.

// One thread calls this for each barrier, and then a fence for the copy engine; then all threads meet at __syncthreads().
__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier_smem, unsigned arrivals) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Counts one arrival. Threads that wait for the phase see what this thread wrote before.
__device__ __forceinline__ void mbarrier_arrive(unsigned long long* barrier_smem) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Announces `bytes` that copies will bring in this phase, and counts one arrival.
__device__ __forceinline__ void mbarrier_expect_bytes(unsigned long long* barrier_smem, unsigned bytes) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity: phases 0, 2, 4, ... have parity 0. Before phase 0 has ended, a wait for
// parity 1 returns at once; a producer's first wait for an empty buffer relies on this.
__device__ __forceinline__ void mbarrier_wait(unsigned long long* barrier_smem, unsigned parity) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    unsigned completed = 0;
    while (!completed) {
        asm volatile(
            "{ .reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(completed)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

// Lets the copy engine see this thread's mbarrier_init.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// The host's description of a tensor in global memory for TMA: address, sizes, strides, the box of one copy, swizzle. A kernel
// has it as a parameter, `const __grid_constant__ TensorMap`, and passes its address to tma_load or tma_store.
struct alignas(64) TensorMap { unsigned char opaque[128]; };

// L2 policies for the lines of a copy: which to evict first or last (the constants of PTX createpolicy).
enum : unsigned long long { L2_EVICT_FIRST = 0x12F0000000000000, L2_EVICT_LAST = 0x14F0000000000000 };

// Copies the box at coordinates (c0, c1, c2, c3), c0 the innermost, to shared memory in the background; elements outside the
// tensor arrive as zeros. One thread issues it. All its bytes, zeros included, count at `barrier_smem`.
__device__ __forceinline__ void tma_load(void* to_smem, const TensorMap* map, unsigned long long* barrier_smem, int c0, int c1,
                                         int c2, int c3, unsigned long long l2_hint) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(to_smem);
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, { %2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(l2_hint)
        : "memory");
}

// Copies `bytes` consecutive bytes, a multiple of 16 as both addresses are, to shared memory in the background; one thread issues
// it. The bytes count at `barrier_smem`.
__device__ __forceinline__ void bulk_load(void* to_smem, const void* from, unsigned bytes, unsigned long long* barrier_smem) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(to_smem);
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

// Copies a box from shared memory to the tensor at (c0, c1, c2, c3) in the background; what lies past the tensor's end is not
// written. One thread issues it, after all threads that wrote the box have called async_proxy_fence() and then met this thread
// at a barrier.
__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from_smem, int c0, int c1, int c2, int c3) {
    const unsigned from = (unsigned)__cvta_generic_to_shared(from_smem);
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, { %1, %2, %3, %4}], [%5];" ::"l"(map),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(from)
                 : "memory");
}

// Closes a group of this thread's stores.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups still read shared memory, which may then be written again.
template <int PENDING> __device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until at most PENDING of this thread's latest groups are still under way; the writes of older groups are visible then.
template <int PENDING> __device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements from shared memory: lane i gives the address of a row (row i % 8 of matrix i / 8)
// and receives, of each matrix, elements [lane / 4][2 * (lane % 4)] and the next one.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row_smem) {
    const unsigned row = (unsigned)__cvta_generic_to_shared(row_smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// As ldmatrix_x4, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row_smem) {
    const unsigned row = (unsigned)__cvta_generic_to_shared(row_smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// Stores four 8x8 matrices of 16-bit elements to shared memory: lane i gives the address of a row (row i % 8 of matrix i / 8)
// and, of each matrix, elements [lane / 4][2 * (lane % 4)] and the next one.
__device__ __forceinline__ void stmatrix_x4(void* row_smem, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned row = (unsigned)__cvta_generic_to_shared(row_smem);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// D += A B for one warp: A is 16x16 (rows x k), B is 16x8 (k x columns), D is 16x8 in fp32.
//   a[0..3]: A[lane / 4 + 8 * (i % 2)][2 * (lane % 4) + 8 * (i / 2)] and the next column
//   b[0..1]: B[2 * (lane % 4) + 8 * i][lane / 4] and the next row
//   upper[0..1], lower[0..1]: D[lane / 4][2 * (lane % 4) + i] and the same 8 rows further
__device__ __forceinline__ void mma_16x8x16(float* upper, float* lower, const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
        : "+f"(upper[0]), "+f"(upper[1]), "+f"(lower[0]), "+f"(lower[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Required between writes of threads to shared memory and reads of the same by TMA or wgmma: the writers call this, and then
// a barrier follows.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Move registers between warpgroups: a producer gives some up, consumers take them. All four warps of a warpgroup call it;
// taking waits until enough registers are free.
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Products of a warpgroup run in the background, in groups. From the issue of a product until its group has been waited for,
// its accumulators belong to it: no thread may read or write them.

// Orders other accesses to the registers of a product before it: required before the first product, and after each access.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of products.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups are still under way.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Called after wgmma_wait: keeps the compiler from moving a use of the accumulators before that wait, where ptxas would insert
// another one.
template <int N> __device__ __forceinline__ void wgmma_received(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The lower word of the descriptor of an operand in shared memory, in rows of 128 bytes with the 128-byte swizzle. It counts
// in units of 16 bytes: adding n moves the operand by 16 n bytes. The operand begins at a multiple of 1024 bytes.
// `leading_bytes`: the distance from 64 rows or columns of an MN-major operand to the next 64; not used for a K-major one.
__device__ __forceinline__ unsigned smem_operand(const void* operand_smem, unsigned leading_bytes) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(operand_smem);
    return (leading_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// The descriptor that wgmma reads. Its upper word has the swizzle, and the stride of 1024 bytes from eight rows to the next
// eight.
__device__ __forceinline__ unsigned long long smem_descriptor(unsigned operand) {
    constexpr unsigned long long SWIZZLE_128_BYTES = 1ull << 62, STRIDE = (1024ull >> 4) << 32;
    return SWIZZLE_128_BYTES | STRIDE | operand;
}

// A barrier of some of the block's warps: `threads` counts those that arrive and those that wait. Ids are 1 to 15; 0 is that of
// __syncthreads().
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A barrier of `threads` threads that all wait, as named_barrier_sync, and whether `one` is true in one of them.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool one) {
    unsigned count;
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %3, 0;\n"
        "bar.red.popc.u32 %0, %1, %2, p; }"
        : "=r"(count)
        : "r"(id), "r"(threads), "r"((unsigned)one)
        : "memory");
    return count > 0;
}

// `x` of WIDTH neighbouring lanes combined, known to all of them.
template <int WIDTH, typename Combine> __device__ __forceinline__ float lane_reduce(float x, Combine combine) {
    for (int lanes = WIDTH / 2; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, lanes));
    return x;
}

// D = A B, or D += A B if `accumulate`: A is 64x16, B 16x64, D in fp32. Thread t of the warpgroup has in
//   d[4 * j + 2 * h + e]: D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e]
// A is K-major in shared memory.
// B is K-major in shared memory.
__device__ __forceinline__ void wgmma_pairs(float (&d)[32], unsigned long long a, unsigned long long b,
                                         bool accumulate) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"((int)accumulate));
}

// D = A B, or D += A B if `accumulate`: A is 64x16, B 16x64, D in fp32. Thread t of the warpgroup has in
//   d[4 * j + 2 * h + e]: D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e]
//   a[2 * i + h]: A[16 * (t / 32) + t % 32 / 4 + 8 * h][2 * (t % 4) + 8 * i] and the next column
// B is K-major in shared memory.
__device__ __forceinline__ void wgmma_held(float (&d)[32], const unsigned (&a)[4], unsigned long long b,
                                         bool accumulate) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, "
        "{ %32, %33, %34, %35}, %36, p, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));
}

// D = A B, or D += A B if `accumulate`: A is 64x16, B 16x64, D in fp32. Thread t of the warpgroup has in
//   d[4 * j + 2 * h + e]: D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e]
//   a[2 * i + h]: A[16 * (t / 32) + t % 32 / 4 + 8 * h][2 * (t % 4) + 8 * i] and the next column
// B is MN-major in shared memory.
__device__ __forceinline__ void wgmma_dqk(float (&d)[32], const unsigned (&a)[4], unsigned long long b,
                                         bool accumulate) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, "
        "{ %32, %33, %34, %35}, %36, p, 1, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));
}

// D = A B, or D += A B if `accumulate`: A is 64x16, B 16x64, D in fp32. Thread t of the warpgroup has in
//   d[4 * j + 2 * h + e]: D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e]
//   a[2 * i + h]: A[16 * (t / 32) + t % 32 / 4 + 8 * h][2 * (t % 4) + 8 * i] and the next column
// B is MN-major in shared memory.
__device__ __forceinline__ void wgmma_dv(float (&d)[32], const unsigned (&a)[4], unsigned long long b,
                                         bool accumulate) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, "
        "{ %32, %33, %34, %35}, %36, p, 1, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));
}

// 3. This variant's score and mask

// allowed: q >= k
__device__ __forceinline__ bool mask(int q_idx, int kv_idx) {
    return q_idx >= kv_idx;
}

// 4. Which tiles are visited
//
// Indices outside a range are not visited: no pair of theirs is allowed.

struct KvRange {
    int begin, end;  // keys outside are forbidden for every row of the block
    int full_begin, full_end;  // keys inside are allowed for every row
};

// The range for rows q_lo to q_hi, solved from q >= k.
__device__ __forceinline__ KvRange kv_range(int q_lo, int q_hi, int kv_len) {
    return {
        0,  // begin
        min(kv_len, q_hi + 1),  // end
        0,  // full_begin
        min(kv_len, q_lo + 1),  // full_end
    };
}

struct QRange {
    int begin, end;  // rows outside allow no key of the block
    int full_begin, full_end;  // rows inside allow every key
};

// The range for keys kv_lo to kv_hi, solved from q >= k.
__device__ __forceinline__ QRange q_range(int kv_lo, int kv_hi, int q_len) {
    return {
        kv_lo,  // begin
        q_len,  // end
        kv_hi,  // full_begin
        q_len,  // full_end
    };
}

// 5. Delta, and lse in powers of 2
//
//     delta = rowsum(dO * O)
//     lse2  = lse log2(e)      +inf for a row without keys, so that all its weights are exp2(S - inf) = 0
//     offset = 0               but lse itself of a row of large scores, whose lse2 is that of the rest
//     lse2, offset = NaN       for a row with NaN or infinity in lse, Q or dO
//
// ROW_LANES lanes compute a row, 8 columns each. The numbers are written for whole tiles, so that a tile's are one copy; rows past
// the end have lse2 = +inf and delta = 0.

// What all tiles of a row need, for the rows of a tile.
struct RowNumbers {
    float lse2[BLOCK_Q], delta[BLOCK_Q], offset[BLOCK_Q];
};

// 16 bytes of a row.
struct alignas(16) Chunk {
    unsigned pairs[4];
};

// Whether an element of a chunk is NaN or infinite.
__device__ __forceinline__ bool has_special(const Chunk& chunk) {
    return (not_finite(chunk.pairs[0]) | not_finite(chunk.pairs[1]) | not_finite(chunk.pairs[2]) | not_finite(chunk.pairs[3])) != 0;
}

extern "C" __global__ void __launch_bounds__(DELTA_THREADS)
gpt2_backward_delta(
    const fp16* __restrict__ O,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ dO,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ Q,  // [batch, q_heads, q_len, 64]
    const float* __restrict__ lse,  // [batch, q_heads, q_len]
    const float* __restrict__ lse_rest,  // [batch, q_heads, q_len]
    RowNumbers* numbers,  // [batch, q_heads, ceil(q_len / 128), 2, 3, 64]
    long long o_stride_b, long long o_stride_h, long long o_stride_s,
    long long do_stride_b, long long do_stride_h, long long do_stride_s,
    long long q_stride_b, long long q_stride_h, long long q_stride_s,
    long long lse_stride_b, long long lse_stride_h, long long lse_stride_s,
    long long lse_rest_stride_b, long long lse_rest_stride_h, long long lse_rest_stride_s,
    int q_heads, int q_len)
{
    const int blocks = (q_len + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int block = blockIdx.x % blocks, h_idx = blockIdx.x / blocks % q_heads, b_idx = blockIdx.x / blocks / q_heads;
    const int column = 8 * (threadIdx.x % ROW_LANES);
    const auto row_of = [&](int r) -> int { return (r * DELTA_THREADS + threadIdx.x) / ROW_LANES; };
    Chunk o[DELTA_ROWS], d[DELTA_ROWS];
    float row_lse[DELTA_ROWS], rest[DELTA_ROWS];
#pragma unroll
    for (int r = 0; r < DELTA_ROWS; ++r) {  // without a branch: no load waits for another
        const int q_idx = min(block * BLOCK_ROWS + row_of(r), q_len - 1), at = min(column, HEAD_DIM_V - 8);
        o[r] = *(const Chunk*)(O + b_idx * o_stride_b + h_idx * o_stride_h + q_idx * o_stride_s + at);
        d[r] = *(const Chunk*)(dO + b_idx * do_stride_b + h_idx * do_stride_h + q_idx * do_stride_s + at);
        row_lse[r] = lse[b_idx * lse_stride_b + h_idx * lse_stride_h + q_idx * lse_stride_s];
        rest[r] = lse_rest[b_idx * lse_rest_stride_b + h_idx * lse_rest_stride_h + q_idx * lse_rest_stride_s];
    }
#pragma unroll
    for (int r = 0; r < DELTA_ROWS; ++r) {
        const int row = row_of(r), q_idx = block * BLOCK_ROWS + row;
        const bool exists = q_idx < q_len;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum = fmaf(low_of(o[r].pairs[i]), low_of(d[r].pairs[i]), sum);
            sum = fmaf(high_of(o[r].pairs[i]), high_of(d[r].pairs[i]), sum);
        }
        sum = lane_reduce<ROW_LANES>(exists && column < HEAD_DIM_V ? sum : 0.0f, [](float x, float y) { return x + y; });
        bool special = exists && (has_special(d[r]) || (row_lse[r] != -INF && !(fabsf(row_lse[r]) < INF)));
        if (exists && row_lse[r] == -INF)  // lse of any other row is not finite if an element of Q is not
#pragma unroll 1
            for (int at = column; at < HEAD_DIM; at += 8 * ROW_LANES)
                special |= has_special(*(const Chunk*)(Q + b_idx * q_stride_b + h_idx * q_stride_h + q_idx * q_stride_s + at));
        special = lane_reduce<ROW_LANES>(special, [](float x, float y) { return fmaxf(x, y); }) > 0.0f;
        if (column > 0) continue;
        RowNumbers& of_tile = numbers[(long long)blockIdx.x * (BLOCK_ROWS / BLOCK_Q) + row / BLOCK_Q];
        const bool has_keys = exists && row_lse[r] != -INF;
        const float offset = has_keys && fabsf(row_lse[r]) * LOG2_E > LARGE ? row_lse[r] : 0.0f;
        of_tile.offset[row % BLOCK_Q] = special ? NOT_A_NUMBER : offset;
        of_tile.lse2[row % BLOCK_Q] = special ? NOT_A_NUMBER : has_keys ? (row_lse[r] - offset) * LOG2_E + rest[r] * LOG2_E : INF;
        of_tile.delta[row % BLOCK_Q] = sum;
    }
}

// 6. Tiles in shared memory

// The rows of Q, K or V of one head in global memory. All loads of rows go through it: nothing else knows how they are stored.
struct HeadRows {
    const TensorMap* map;
    int h_idx, b_idx;

    // One thread: copies 64 columns of some rows to `smem` in the background. `row` is the first; `map` states how many
    __device__ __forceinline__ void load_async(unsigned char* smem, unsigned long long* full, int column, int row,
                                               unsigned long long l2_hint) const {
        tma_load(smem, map, full, column, row, h_idx, b_idx, l2_hint);
    }
};

// A tile of TILE_ROWS rows in shared memory: SLABS slabs of 64 columns, one after another, and room for EXTRA_SLABS more,
// which copies do not write. A row of a slab is ROW_BYTES long, and its eight 16-byte chunks are permuted by exclusive or
// with the row's number modulo 8, as TMA writes and wgmma reads them: the swizzle of 128 bytes. A tile begins at a multiple
// of 1024 bytes.
template <int TILE_ROWS, int SLABS, int EXTRA_SLABS = 0> struct SlabTile {
    static constexpr int SLAB_BYTES = TILE_ROWS * ROW_BYTES, BYTES = (SLABS + EXTRA_SLABS) * SLAB_BYTES;
    unsigned char* smem;

    // One thread: copies TILE_ROWS rows in the background, of which `row` is the first. Columns past the head size and rows
    // past the last one arrive as zeros. The bytes, and one arrival, count at the mbarrier `full`.
    __device__ __forceinline__ void load_async(const HeadRows& rows, unsigned long long* full, int row,
                                               unsigned long long l2_hint) const {
        mbarrier_expect_bytes(full, SLABS * SLAB_BYTES);
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
            rows.load_async(smem + slab * SLAB_BYTES, full, 64 * slab, row, l2_hint);
    }

    // The address of 16 bytes of a row: chunk 0 to 7 of its part in a slab.
    __device__ __forceinline__ unsigned char* at(int slab, int row, int chunk) const {
        return smem + slab * SLAB_BYTES + row * ROW_BYTES + (chunk ^ row % 8) * 16;
    }

    // The tile as an operand of wgmma. K-major, each product reads 16 columns; MN-major, 16 rows. The functions below add the
    // offset, in units of 16 bytes, of what product `step` reads.
    __device__ __forceinline__ unsigned k_major() const { return smem_operand(smem, 0); }
    __device__ __forceinline__ unsigned mn_major() const { return smem_operand(smem, SLAB_BYTES); }
    __device__ static constexpr unsigned k_major_step(int step) { return step / 4 * (SLAB_BYTES / 16) + step % 4 * 2; }
    __device__ static constexpr unsigned mn_major_step(int step) { return step * (16 * ROW_BYTES / 16); }
};
using OTile = SlabTile<16, OUTPUT_SLABS>;  // rows of a warp, on their way to global memory

// A place in a ring of stages: the stage, and the parity of the current phase of its mbarriers, which flips each time the
// position passes the end of the ring.
struct Position {
    int index = 0;
    unsigned phase = 0;

    __device__ __forceinline__ void advance(int stages) {
        if (++index == stages) index = 0, phase ^= 1;
    }
};

// A ring of tiles in shared memory, one for each stage.
//     full[stage]  a phase of it ends when the bytes of the stage's tile have arrived: then the tile may be read
template <typename Tile> struct Ring {
    Tile first;                // the tile of stage 0
    unsigned long long* full;  // one for each stage

    __device__ __forceinline__ Tile tile(int stage) const { return {first.smem + stage * Tile::BYTES}; }
    // One thread: copies a tile, of which `row` is the first row, to `stage`
    template <typename Rows = HeadRows>
    __device__ __forceinline__ void load_async(int stage, const Rows& rows, int row,
                                               unsigned long long l2_hint = L2_EVICT_LAST) const {
        tile(stage).load_async(rows, full + stage, row, l2_hint);
    }
    __device__ __forceinline__ void wait_full(const Position& at) const { mbarrier_wait(full + at.index, at.phase); }
};

// A ring between a producer and consumers. Tiles and mbarriers are shared; each role has a position of its own.
//     empty[stage]  a phase of it ends when all readers of the stage have released it: then the next tile may be copied there
template <typename Tile> struct Pipeline : Ring<Tile> {
    unsigned long long* empty;  // one for each stage

    // The producer, before it copies: waits until the stage is empty. In the first round it is, and the wait returns at once
    __device__ __forceinline__ void acquire(const Position& at) const { mbarrier_wait(empty + at.index, at.phase ^ 1); }
    // A reader, when it has read the stage
    __device__ __forceinline__ void release(const Position& at) const { mbarrier_arrive(empty + at.index); }
};

// 7. What both kernels share

// Fragments of S and O: of the 16 rows of a product, lane l holds rows l / 4 and l / 4 + 8; of every 8 columns, columns
// 2 * (l % 4) and the next. The four lanes with the same l / 4 share a row.
//
// For register i of a tile of pairs, or of a sum: the lane's row, 0 (the upper) or 1 (the lower); and the column, in a lane
// with lane % 4 == 0.
__device__ constexpr int row_in_pair(int i) { return i / 2 % 2; }
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

// A work tile: BLOCK_ROWS rows, or keys, of one head, which a block of threads owns. Heads are divided into sections of
// `heads_in_l2`, and work tiles are numbered section by section: blocks that run at the same time read the same tiles from L2.
struct WorkTile {
    int block, h_idx, b_idx;
};
__device__ __forceinline__ WorkTile work_tile_of(int number, int works, int blocks, int heads, int heads_in_l2) {
    const int first_head = number / (heads_in_l2 * blocks) * heads_in_l2;  // the first head of the section
    const int in_section = min(heads_in_l2, works / blocks - first_head);   // heads; the last section may have fewer
    const int place = number - first_head * blocks, head = first_head + place % in_section;
    return {place / in_section, head % heads, head / heads};
}
constexpr int END = -1;  // as a block: there is no more work

// What the producer publishes of a work tile, together with the tile that it copies first.
struct Work {
    int block, h_idx, b_idx, any;  // any: whether there is a tile to visit
    int part;  // a part of the query heads that share the keys
    int next, h_begin, h_end;  // for the producer alone, which has few registers: the next work tile, and its query heads
};

constexpr int NO_TILE = 1 << 30;  // as a first tile: there is none

// What the producer publishes of a tile to visit, in one number: the tile, for which consumers it is partial, and in bit 0
// whether it is the last. SPECIAL: a consumer found large rows, NaN or infinity.
constexpr int SPECIAL = 1 << (CONSUMERS + 1);
__device__ constexpr int visit_of(int tile, int partial) { return tile << (CONSUMERS + 2) | partial << 1; }
__device__ constexpr int tile_of(int visit) { return visit >> (CONSUMERS + 2); }
__device__ constexpr bool is_partial(int visit, int consumer) { return visit >> (consumer + 1) & 1; }
__device__ constexpr bool is_last(int visit) { return visit & 1; }

// A tile that the producer has found and not yet begun to copy.
struct Found {
    int visit, h_idx;
};
constexpr int FOUND = 64;  // places: 32 are written at once if at most one tile waits, while another may still be read

// What the producer publishes, in shared memory; `found` is its own.
struct TileFeed {
    Work works[2];  // by the phase of what is held: the current work tile, and the one before
    Found found[FOUND];
    // of the tile of each stage
    int visits[STAGES], visit_heads[STAGES];
};

// Writes a warp's 16 rows of a sum, times `factor`, through the warp's own tile in shared memory. TMA writes no row past the
// last one.
template <int COLUMNS, typename Tile>
__device__ __forceinline__ void store_rows(const Tile& rows, const TensorMap* map, const float (&sum)[COLUMNS / 2], float factor,
                                           int first_row, int h_idx, int place) {
    const int lane = thread_index() % 32;
    if (lane == 0) tma_store_wait_read<0>();  // earlier copies have read the tile
    __syncwarp();
    const auto out = [&](int i) { return pack(sum[i] * factor, sum[i + 1] * factor); };
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 8) {  // 16 columns each
        const bool both = i + 4 < COLUMNS / 2;
        stmatrix_x4(rows.at(i / 32, lane % 16, i % 32 / 4 + lane / 16), out(i), out(i + 2), both ? out(i + 4) : 0,
                    both ? out(i + 6) : 0);
    }
    async_proxy_fence();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
        for (int slab = 0; 64 * slab < COLUMNS; ++slab)
            tma_store(map, rows.smem + slab * Tile::SLAB_BYTES, 64 * slab, first_row, h_idx, place);
        tma_store_commit();
    }
}

// Four registers of a thread that lie side by side: those with the same numbers of all threads of a warpgroup are neighbours.
struct alignas(16) Four {
    float numbers[4];
};

// Stores a sum of 64 rows, register by register.
template <int COLUMNS> __device__ __forceinline__ void store_part(float* to, const float (&sum)[COLUMNS / 2]) {
    Four* const mine = (Four*)to + thread_index() % 128;
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i) mine[i * 128] = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
}

// Adds to a sum of 64 rows what lies in global memory, register by register.
template <int COLUMNS> __device__ __forceinline__ void add_registers(float (&sum)[COLUMNS / 2], const float* from) {
    const Four* const mine = (const Four*)from + thread_index() % 128;
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i) {
        const Four four = mine[i * 128];
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[4 * i + j] += four.numbers[j];
    }
}

// 8. Gradients of keys and values
//
//     S = s,  s = softmax_scale * Q K^T,  dP = dO V^T
//     P = exp(S - lse)   where q >= k, else 0
//     dS = P * (dP - delta)   where q >= k, else 0
//     dV = sum of P^T dO,  dK = softmax_scale * sum of dS^T Q
//
// A block holds the keys and values of CONSUMERS * BLOCK_KV keys, each consumer those of BLOCK_KV, and visits the tiles of rows
// of all query heads that share them, in a fixed order: every run has the same bits. S, P and dS are computed transposed.
//
//     producer     K, V | Q0 dO0  Q1 dO1  Q2 dO2 ...                          each as soon as a stage is empty
//     products     K Q0 | V dO0, P0 dO0, dS0 Q0, K Q1 | V dO1, P1 dO1, dS1 Q1, K Q2 | ...
//     threads           |      P0     dS0             |      P1     dS1             | ...
//

namespace of_keys {
using KTile = SlabTile<BLOCK_ROWS, QK_SLABS>;
using VTile = SlabTile<BLOCK_ROWS, V_SLABS>;
using QTile = SlabTile<BLOCK_Q, QK_SLABS>;
using DoTile = SlabTile<BLOCK_Q, V_SLABS>;

// What the roles of a block share: the arguments of the call, and shared memory with the mbarriers that guard it.
struct Block {
    const TensorMap *k_map, *v_map, *q_map, *do_map, *dk_map, *dv_map;
    const RowNumbers* numbers;
    float* part_sums;
    int parts;
    unsigned* next_work;
    int batch, q_heads, kv_heads, q_len, kv_len, heads_in_l2;

    Pipeline<KTile> k;  // the work tile's, and with it `works` of the feed
    Pipeline<VTile> v;
    Pipeline<QTile> q;  // tiles that are visited, and with each what the feed has of it
    Ring<DoTile> dO;  // released with `q`
    OTile out;             // first of [4 * CONSUMERS]: the rows of each warp on their way to global memory
    volatile TileFeed* feed;
    RowNumbers* tile_numbers;  // [STAGES]

    // Where this role is: in the rings of what is held, and of what is visited
    Position work_at, tile_at;

    __device__ __forceinline__ volatile Work& work() const { return feed->works[work_at.phase]; }

    // Where the sums of 64 keys of a work tile that has a part of a group begin, those of dK first
    __device__ __forceinline__ float* sums_of_part(const volatile Work& of, int keys) const {
        const int blocks = (kv_len + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const long long tile = ((of.b_idx * kv_heads + of.h_idx) * blocks + of.block) * parts + of.part;
        return part_sums + (tile * CONSUMERS + keys) * (WARPGROUP_ROWS * (HEAD_DIM + HEAD_DIM_V));
    }

    // All threads, before the roles begin
    __device__ __forceinline__ void set_up() const {
        if (threadIdx.x == 0) {
            mbarrier_init(k.full, 1);
            mbarrier_init(v.full, 1);
            mbarrier_init(k.empty, RELEASES);
            mbarrier_init(v.empty, RELEASES);
            for (int stage = 0; stage < STAGES; ++stage) {
                mbarrier_init(q.full + stage, 2);  // two copies: the tile, and numbers of its rows
                mbarrier_init(dO.full + stage, 1);
                mbarrier_init(q.empty + stage, RELEASES);
            }
            mbarrier_init_fence();
        }
        __syncthreads();  // the barriers are there; after this no wait is for the whole block
    }
};

// The producer: the first warp of its warpgroup. Its lanes find the tiles to visit, 32 at once, and one of them copies.
struct Producer : Block {
    int h_idx, next_tile;      // where the search is: the first tile of this head that no lane has looked at
    int place = 0, count = 0;  // tiles that wait in `found`: the first one's index, and their number

    // Recomputed at each use, not kept in registers
    __device__ __forceinline__ int blocks() const { return (opaque(kv_len) + BLOCK_ROWS - 1) / BLOCK_ROWS; }
    __device__ __forceinline__ int work_tiles() const { return blocks() * kv_heads * batch * parts; }

    // All work tiles and their tiles, in the order of the consumers
    __device__ __forceinline__ void load() {
        const bool elected = threadIdx.x == 0;
        int next = blockIdx.x;
        while (next < work_tiles()) {
            k.acquire(work_at);
            if (elected) begin_work_tile(next);
            __syncwarp();
            h_idx = work().h_begin, next_tile = 0;
            for (bool first = true;; first = false) {
                // two tiles wait, or no head is left: the last one of a work tile is known by it
                const bool looks = count < 2 && h_idx < work().h_end;
                while (count < 2 && h_idx < work().h_end) look_at_tiles();
                // once for each work tile: when TAKEN_BEFORE tiles are left, or all if they are fewer
                const bool few = looks ? count <= TAKEN_BEFORE : count == TAKEN_BEFORE;
                if (elected && few && h_idx >= work().h_end) take_work_tile();
                if (first && elected) load_held(count > 0);
                if (count == 0) break;
                if (elected) load_tile(feed->found[place]);
                place = (place + 1) % FOUND, --count;
            }
            __syncwarp();
            next = work().next;
            work_at.advance(1);
        }
        k.acquire(work_at);
        if (elected) {
            work().block = END;
            mbarrier_arrive(k.full);
        }
    }

    // Takes the next work tile from the counter, some tiles before the end of this one
    static constexpr int TAKEN_BEFORE = 16;
    __device__ __forceinline__ void take_work_tile() const {
        work().next = gridDim.x + atomicInc(next_work, work_tiles() - 1);  // wraps to 0 after the last one
    }

    // Publishes the coordinates of a work tile
    __device__ __forceinline__ void begin_work_tile(int number) const {
        const int group_size = opaque(q_heads) / kv_heads;
        const WorkTile at = work_tile_of(number, work_tiles(), blocks(), kv_heads * parts,
                                         opaque(heads_in_l2) / group_size * parts);
        work().h_begin = at.h_idx * group_size / parts, work().h_end = (at.h_idx + 1) * group_size / parts;
        work().h_idx = at.h_idx / parts, work().part = at.h_idx % parts;  // each part is numbered as a head
        work().block = at.block;
        work().b_idx = at.b_idx;
    }

    // Classifies the next 32 tiles of the head, one by each lane
    __device__ __forceinline__ void look_at_tiles() {
        const int first_kv_tile = CONSUMERS * work().block;
        int begin = NO_TILE, end = 0;
        int full_begin = 0, full_end = 0;
        {  // the range of 64 keys by every CONSUMERS-th lane, then what they have in all
            const int kv_tile = first_kv_tile + threadIdx.x % CONSUMERS, kv_lo = kv_tile * BLOCK_KV;
            if (kv_lo < kv_len) {
                const int kv_hi = min(kv_lo + BLOCK_KV, kv_len) - 1;
                const QRange range = q_range(kv_lo, kv_hi, q_len);
                if (range.begin < range.end) begin = range.begin / BLOCK_Q, end = (range.end + BLOCK_Q - 1) / BLOCK_Q;
                full_begin = (range.full_begin + BLOCK_Q - 1) / BLOCK_Q, full_end = range.full_end / BLOCK_Q;
            }
            for (int lanes = 1; lanes < CONSUMERS; lanes *= 2) {
                begin = min(begin, __shfl_xor_sync(0xffffffff, begin, lanes));
                end = max(end, __shfl_xor_sync(0xffffffff, end, lanes));
            }
        }
        next_tile = max(next_tile, begin);
        const int q_tile = next_tile + threadIdx.x;
        const bool visited = q_tile < end;
        int partial = 0;  // a bit for each 64 keys for which the tile is not full
#pragma unroll 1
        for (int group = 0; group < CONSUMERS; ++group) {
            const int from = __shfl_sync(0xffffffff, full_begin, group), to = __shfl_sync(0xffffffff, full_end, group);
            partial |= (q_tile < from || q_tile >= to) << group;
        }
        const unsigned lanes = __ballot_sync(0xffffffff, visited);
        if (visited) {
            volatile Found& mine = feed->found[(place + count + __popc(lanes & ((1u << threadIdx.x) - 1))) % FOUND];
            mine.visit = visit_of(q_tile, partial), mine.h_idx = h_idx;
        }
        __syncwarp();
        count += __popc(lanes), next_tile += 32;
        if (next_tile >= end) ++h_idx, next_tile = 0;
    }

    // K and V of the work tile. No other block reads these rows
    __device__ __forceinline__ void load_held(bool any) {
        volatile Work& at = work();
        at.any = any;
        k.load_async(0, {k_map, at.h_idx, at.b_idx}, at.block * BLOCK_ROWS, L2_EVICT_FIRST);
        v.acquire(work_at);
        v.load_async(0, {v_map, at.h_idx, at.b_idx}, at.block * BLOCK_ROWS, L2_EVICT_FIRST);
    }

    // A tile to visit, and numbers of its rows
    __device__ __forceinline__ void load_tile(const volatile Found& tile) {
        const int visit = tile.visit | (count == 1), h_idx = tile.h_idx;  // bit 0: consumers stop after this tile
        const int q_lo = tile_of(visit) * BLOCK_Q, b_idx = work().b_idx;
        q.acquire(tile_at);
        feed->visits[tile_at.index] = visit;
        const int tiles = BLOCK_ROWS / BLOCK_Q * ((q_len + BLOCK_ROWS - 1) / BLOCK_ROWS);  // a head's tiles in `numbers`
        const RowNumbers* of_head = numbers + (long long)(b_idx * q_heads + h_idx) * tiles;
        mbarrier_expect_bytes(q.full + tile_at.index, sizeof(RowNumbers));
        bulk_load(tile_numbers + tile_at.index, of_head + tile_of(visit), sizeof(RowNumbers), q.full + tile_at.index);
        q.load_async(tile_at.index, {q_map, h_idx, b_idx}, q_lo);
        dO.load_async(tile_at.index, {do_map, h_idx, b_idx}, q_lo);
        tile_at.advance(STAGES);
    }
};

// A consumer thread's registers of the matrices: accumulators, and operands as unsigned.
struct Fragments {
    float S[BLOCK_Q / 2];   // s; then the factor of dP - delta, which is P itself for most scores
    float dP[BLOCK_Q / 2];
    float dK[HEAD_DIM / 2], dV[HEAD_DIM_V / 2];
    unsigned P[BLOCK_Q / 16][4], dS[BLOCK_Q / 16][4];
    unsigned K[K_STEPS][4], V[V_STEPS][4];
};

// A consumer warpgroup: computes dK and dV of 64 keys. Each of its threads has the members in registers.
struct Consumer : Block {
    int consumer, lane;  // numbers: of this warpgroup among consumers, of this thread in its warp
    int lane_key;  // this lane's first key in the block; its second is 8 further
    unsigned q_operand, q_rows_operand, do_operand, do_rows_operand;  // stage 0's

    Fragments& frag;

    // The current work tile, and the current tile
    int visit, kv_lo;

    __device__ __forceinline__ Consumer(const Block& block, int number, Fragments& frag)
        : Block(block), consumer(number), frag(frag) {
        lane = threadIdx.x % 32;
        lane_key = WARPGROUP_ROWS * consumer + 16 * (threadIdx.x % 128 / 32) + lane / 4;
        q_operand = q.first.k_major(), q_rows_operand = q.first.mn_major();
        do_operand = dO.first.k_major(), do_rows_operand = dO.first.mn_major();
    }

    // Loads the keys and values of a work tile as A operands: lane l points at row l % 16, columns 8 * (l / 16) of 16 x 16 rows
    // and columns. What no product reads from shared memory is released: the next is copied while this work tile is computed
    __device__ __forceinline__ void hold_keys() {
        const int row = 16 * (thread_index() / 32 - 4) + lane % 16;  // the row in the block
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) ldmatrix_x4(frag.K[step], k.first.at(0, row, step * 2 + lane / 16));
        k.release(work_at);
        v.wait_full(work_at);
#pragma unroll
        for (int step = 0; step < V_STEPS; ++step) ldmatrix_x4(frag.V[step], v.first.at(0, row, step * 2 + lane / 16));
        v.release(work_at);
    }

    // S^T = K Q^T, issued
    __device__ __forceinline__ void issue_scores() {
        const unsigned long long q_tile = smem_descriptor(q_operand + tile_at.index * (QTile::BYTES / 16));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
            wgmma_held(frag.S, frag.K[step], q_tile + QTile::k_major_step(step), step > 0);
        wgmma_commit();
    }

    // dP^T = V dO^T, issued
    __device__ __forceinline__ void issue_weight_gradients() {
        const unsigned long long do_tile = smem_descriptor(do_operand + tile_at.index * (DoTile::BYTES / 16));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < V_STEPS; ++step)
            wgmma_held(frag.dP, frag.V[step], do_tile + DoTile::k_major_step(step), step > 0);
        wgmma_commit();
    }

    // dV += P^T dO, issued
    __device__ __forceinline__ void issue_dv() {
        const unsigned long long do_tile = smem_descriptor(do_rows_operand + tile_at.index * (DoTile::BYTES / 16));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_Q / 16; ++step)
            wgmma_dv(frag.dV, frag.P[step], do_tile + DoTile::mn_major_step(step), true);
        wgmma_commit();
    }

    // dK += dS^T Q, issued; softmax_scale is applied at the end
    __device__ __forceinline__ void issue_dk() {
        const unsigned long long q_tile = smem_descriptor(q_rows_operand + tile_at.index * (QTile::BYTES / 16));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_Q / 16; ++step)
            wgmma_dqk(frag.dK, frag.dS[step], q_tile + QTile::mn_major_step(step), true);
        wgmma_commit();
    }

    // P^T from S^T, rounded
    template <bool PARTIAL> __device__ __forceinline__ void compute_weights() {
        const int q_lo = tile_of(visit) * BLOCK_Q;
        const RowNumbers& of_row = tile_numbers[tile_at.index];
#pragma unroll
        for (int first = 0; first < BLOCK_Q / 2; first += 2) {
            float weights[2];
#pragma unroll
            for (int i = first; i < first + 2; ++i) {
                const int row = lane % 4 * 2 + column_of(i);  // the row in the tile
                const int q_idx = q_lo + row;
                const int kv_idx = kv_lo + lane_key + 8 * row_in_pair(i);
                const float s = frag.S[i];
                float exponent = s;
                if constexpr (PARTIAL) exponent = (__fmul_rn(exponent, softmax_scale) - of_row.offset[row]) * LOG2_E;
                else exponent *= EXPONENT_SCALE;
                float weight = fast_exp2(exponent - of_row.lse2[row]);
                float slope = weight;
                if constexpr (PARTIAL) {
                    if (q_lo + row >= q_len || !mask(q_idx, kv_idx)) weight = slope = 0.0f;
                }
                weights[i - first] = weight;
                frag.S[i] = slope;
            }
            frag.P[first / 8][first / 2 % 4] = pack(weights[0], weights[1]);
        }
    }

    // dS^T, the gradient of s, rounded
    template <bool PARTIAL> __device__ __forceinline__ void score_gradients() {
        const RowNumbers& of_row = tile_numbers[tile_at.index];
        const auto gradient = [&](int i) {
            return PARTIAL && frag.S[i] == 0.0f ? 0.0f : frag.S[i] * (frag.dP[i] - of_row.delta[lane % 4 * 2 + column_of(i)]);
        };
#pragma unroll
        for (int i = 0; i < BLOCK_Q / 2; i += 2) frag.dS[i / 8][i / 2 % 4] = pack(gradient(i), gradient(i + 1));
    }

    // Reads what the producer has published of the current tile
    __device__ __forceinline__ void read_visit() {
        visit = __shfl_sync(0xffffffff, feed->visits[tile_at.index], 0);
        // A tile with a row of large scores, or with NaN or infinity, counts as partial
        const float* number = tile_numbers[tile_at.index].offset;
        bool mine = false;
#pragma unroll
        for (int row = lane; row < BLOCK_Q; row += 32) mine |= number[row] != 0.0f;
        if (__any_sync(0xffffffff, mine)) visit |= visit_of(0, 1 << consumer) | SPECIAL;
    }

    // Sets the rows of the tile in which Q or dO has NaN or infinity to 0 in both, if there are any. All consumers do it together
    __device__ __forceinline__ void clear_rows() {
        const float* number = tile_numbers[tile_at.index].lse2;
        bool mine = false;
#pragma unroll
        for (int row = lane; row < BLOCK_Q; row += 32) mine |= number[row] != number[row];
        if (!__any_sync(0xffffffff, mine)) return;
        dO.wait_full(tile_at);
        named_barrier_sync(1, RELEASES);  // no product of the other consumer reads the tile any more
#pragma unroll 1
        for (int i = thread_index() - 128; i < 8 * BLOCK_Q; i += RELEASES) {  // eight chunks of each row of a slab
            if (number[i / 8] == number[i / 8]) continue;
#pragma unroll 1
            for (int slab = 0; slab < QK_SLABS; ++slab)
                *(Chunk*)(q.first.smem + tile_at.index * QTile::BYTES + slab * QTile::SLAB_BYTES + 16 * i) = {};
#pragma unroll 1
            for (int slab = 0; slab < V_SLABS; ++slab)
                *(Chunk*)(dO.first.smem + tile_at.index * DoTile::BYTES + slab * DoTile::SLAB_BYTES + 16 * i) = {};
        }
        async_proxy_fence();
        named_barrier_sync(1, RELEASES);  // the rows are 0: products may read the tile again
    }

    // One tile of rows, whose scores are there; LAST: no other follows in the work tile
    template <bool PARTIAL, bool LAST> __device__ __forceinline__ void step() {
        if (PARTIAL && visit & SPECIAL) clear_rows();
        dO.wait_full(tile_at);
        issue_weight_gradients();
        compute_weights<PARTIAL>();
        issue_dv();
        wgmma_wait<1>();
        wgmma_received(frag.dP);
        score_gradients<PARTIAL>();
        issue_dk();
        const Position done = tile_at;
        tile_at.advance(STAGES);
        if constexpr (!LAST) {
            q.wait_full(tile_at);
            read_visit();
            issue_scores();
            wgmma_wait<1>();
            q.release(done);  // Q, and dO too
            wgmma_wait<0>();
            wgmma_received(frag.S);
        } else {
            wgmma_wait<0>();
            q.release(done);
        }
        wgmma_received(frag.dK);
        wgmma_received(frag.dV);
    }

    // All tiles of a work tile, and then the results dK and dV
    __device__ __forceinline__ void sum_tiles() {
        hold_keys();
        q.wait_full(tile_at);
        read_visit();
        issue_scores();
        wgmma_wait<0>();
        wgmma_received(frag.S);
#pragma unroll 1
        while (!is_last(visit)) {
            if (is_partial(visit, consumer)) step<true, false>();
            else step<false, false>();
        }
        if (is_partial(visit, consumer)) step<true, true>();
        else step<false, true>();
    }

    // Every work tile
    __device__ __forceinline__ void compute() {
        for (;; work_at.advance(1)) {
            k.wait_full(work_at);
            if (__shfl_sync(0xffffffff, work().block, 0) == END) break;
            kv_lo = work().block * BLOCK_ROWS;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; ++i) frag.dK[i] = 0.0f;
#pragma unroll
            for (int i = 0; i < HEAD_DIM_V / 2; ++i) frag.dV[i] = 0.0f;
            if (__shfl_sync(0xffffffff, work().any, 0)) {
                sum_tiles();
            } else {
                v.wait_full(work_at);
                k.release(work_at);
                v.release(work_at);
            }
            // read again: the slot is written when K of the next work tile has been released too
            const volatile Work& done = work();
            const int warp = thread_index() / 32 - 4, first_key = done.block * BLOCK_ROWS + 16 * warp;
            const OTile rows = {out.smem + warp * OTile::BYTES};
            if (parts > 1) {
                float* const sums = sums_of_part(done, consumer);
                store_part<HEAD_DIM>(sums, frag.dK);
                store_part<HEAD_DIM_V>(sums + WARPGROUP_ROWS * HEAD_DIM, frag.dV);
                continue;
            }
            store_rows<HEAD_DIM>(rows, dk_map, frag.dK, softmax_scale, first_key, done.h_idx, done.b_idx);
            store_rows<HEAD_DIM_V>(rows, dv_map, frag.dV, 1.0f, first_key, done.h_idx, done.b_idx);
        }
        if (lane == 0) tma_store_wait<0>();  // the copies read shared memory, which the block frees when it ends
    }
};

}  // namespace of_keys

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gpt2_backward_dk_dv(
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap do_map,
    const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
    const RowNumbers* __restrict__ numbers,  // [batch, q_heads, ceil(q_len / 128), 2, 3, 64]
    float* part_sums,  // [(parts > 1), batch, kv_heads, ceil(kv_len / 128), parts, 128, 128]
    int parts,  // parts of a group of query heads, each with work tiles of its own
    unsigned* next_work,  // [1]
    int batch, int q_heads, int kv_heads, int q_len, int kv_len,
    int heads_in_l2)  // query heads whose blocks are numbered together
{
    extern __shared__ __align__(1024) unsigned char smem[];

    unsigned long long* const barriers = (unsigned long long*)(smem + BARRIERS_SMEM);
    const of_keys::Block block = {
        &k_map, &v_map, &q_map, &do_map, &dk_map, &dv_map,
        numbers,
        part_sums,
        parts,
        next_work,
        batch, q_heads, kv_heads, q_len, kv_len, heads_in_l2,
        {{{smem + HELD_QK_SMEM}, barriers}, barriers + 1},
        {{{smem + HELD_V_SMEM}, barriers + 2}, barriers + 3},
        {{{smem + VISITED_QK_SMEM}, barriers + 4}, barriers + 4 + STAGES},
        {{smem + VISITED_V_SMEM}, barriers + 4 + 2 * STAGES},
        {smem + OUT_SMEM},
        (volatile TileFeed*)(smem + VISITS_SMEM),
        (RowNumbers*)(smem + ROW_NUMBERS_SMEM),
    };
    block.set_up();

    // The shuffle tells the compiler that all lanes of a warp have the same value, which it cannot see of threadIdx.x / 128. It
    // then branches once for all lanes, and keeps values that depend on the warpgroup in uniform registers
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        give_registers<40>();
        of_keys::Producer producer = {block};
        if (threadIdx.x < 32) producer.load();
    } else {
        take_registers<232>();
        // Not members of Consumer: the compiler keeps an object with arrays in registers only if loops over these are unrolled
        of_keys::Fragments frag;
        of_keys::Consumer consumer(block, warpgroup - 1, frag);
        consumer.compute();
    }
}

// 9. Gradients of keys and values from those of parts of a group
//
//     dK = softmax_scale * sum over parts,  dV = sum over parts
//
// Launched if the query heads of a group are divided over several work tiles. A block has dK or dV of 64 keys, and adds the parts
// in their order: every run has the same bits.

constexpr int PART_SUMS = CONSUMERS * WARPGROUP_ROWS * (HEAD_DIM + HEAD_DIM_V);  // the sums of a part, over the keys of a block

// The sum of parts, stored
template <int COLUMNS>
__device__ __forceinline__ void store_sum_of_parts(const OTile& rows, const TensorMap* map, const float* sums, int parts, float factor,
                                                   int first_key, int kv_h_idx, int place) {
    float sum[COLUMNS / 2] = {};
#pragma unroll 1
    for (int part = 0; part < parts; ++part) add_registers<COLUMNS>(sum, sums + part * PART_SUMS);
    store_rows<COLUMNS>(rows, map, sum, factor, first_key, kv_h_idx, place);
}

extern "C" __global__ void __launch_bounds__(128)
gpt2_backward_add_parts(
    const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
    const float* __restrict__ part_sums,  // [(parts > 1), batch, kv_heads, ceil(kv_len / 128), parts, 128, 128]
    int parts,  // parts of a group of query heads, each with work tiles of its own
    int kv_heads, int kv_len)
{
    __shared__ __align__(1024) unsigned char rows_smem[4 * OTile::BYTES];

    const int blocks = (kv_len + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int keys = blockIdx.x / 2 % CONSUMERS, tile = blockIdx.x / 2 / CONSUMERS;
    const int block = tile % blocks, kv_h_idx = tile / blocks % kv_heads, b_idx = tile / blocks / kv_heads;
    const int warp = threadIdx.x / 32, first_key = block * BLOCK_ROWS + keys * WARPGROUP_ROWS + 16 * warp;
    const OTile rows = {rows_smem + warp * OTile::BYTES};
    const float* const sums = part_sums + (long long)tile * parts * PART_SUMS + keys * (WARPGROUP_ROWS * (HEAD_DIM + HEAD_DIM_V));
    if (blockIdx.x % 2 == 0) store_sum_of_parts<HEAD_DIM>(rows, &dk_map, sums, parts, softmax_scale, first_key, kv_h_idx, b_idx);
    else store_sum_of_parts<HEAD_DIM_V>(rows, &dv_map, sums + WARPGROUP_ROWS * HEAD_DIM, parts, 1.0f, first_key, kv_h_idx, b_idx);
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();  // the copies read shared memory, which the block frees when it ends
}

// 10. Gradients of queries
//
//     S = s,  s = softmax_scale * Q K^T,  dP = dO V^T
//     P = exp(S - lse)   where q >= k, else 0
//     dS = P * (dP - delta)   where q >= k, else 0
//     dQ = softmax_scale * sum of dS K
//
// A block holds CONSUMERS * BLOCK_Q rows of Q and dO, each consumer BLOCK_Q of them, and visits tiles of keys, as the forward does.

namespace of_rows {
using QTile = SlabTile<BLOCK_ROWS, QK_SLABS>;
using DoTile = SlabTile<BLOCK_ROWS, V_SLABS>;
using KTile = SlabTile<BLOCK_KV, QK_SLABS>;
using VTile = SlabTile<BLOCK_KV, V_SLABS>;

// What the roles of a block share: the arguments of the call, and shared memory with the mbarriers that guard it.
struct Block {
    const TensorMap *q_map, *do_map, *k_map, *v_map, *dq_map;
    const RowNumbers* numbers;
    unsigned* next_work;
    int batch, q_heads, kv_heads, q_len, kv_len, heads_in_l2;

    Pipeline<QTile> q;  // the work tile's, and with it `works` of the feed
    Ring<DoTile> dO;  // released with `q`
    Pipeline<KTile> k;  // tiles that are visited, and with each what the feed has of it
    Ring<VTile> v;  // released with `k`
    OTile out;             // first of [4 * CONSUMERS]: the rows of each warp on their way to global memory
    volatile TileFeed* feed;

    // Where this role is: in the rings of what is held, and of what is visited
    Position work_at, tile_at;

    __device__ __forceinline__ volatile Work& work() const { return feed->works[work_at.phase]; }

    // All threads, before the roles begin
    __device__ __forceinline__ void set_up() const {
        if (threadIdx.x == 0) {
            mbarrier_init(q.full, 1);
            mbarrier_init(dO.full, 1);
            mbarrier_init(q.empty, RELEASES);
            for (int stage = 0; stage < STAGES; ++stage) {
                mbarrier_init(k.full + stage, 1);
                mbarrier_init(v.full + stage, 1);
                mbarrier_init(k.empty + stage, RELEASES);
            }
            mbarrier_init_fence();
        }
        __syncthreads();  // the barriers are there; after this no wait is for the whole block
    }
};

// The producer: the first warp of its warpgroup. Its lanes find the tiles to visit, 32 at once, and one of them copies.
struct Producer : Block {
    int h_idx, next_tile;      // where the search is: the first tile of this head that no lane has looked at
    int place = 0, count = 0;  // tiles that wait in `found`: the first one's index, and their number

    // Recomputed at each use, not kept in registers
    __device__ __forceinline__ int blocks() const { return (opaque(q_len) + BLOCK_ROWS - 1) / BLOCK_ROWS; }
    __device__ __forceinline__ int work_tiles() const { return blocks() * q_heads * batch; }

    // All work tiles and their tiles, in the order of the consumers
    __device__ __forceinline__ void load() {
        const bool elected = threadIdx.x == 0;
        int next = blockIdx.x;
        while (next < work_tiles()) {
            q.acquire(work_at);
            if (elected) begin_work_tile(next);
            __syncwarp();
            h_idx = work().h_begin, next_tile = 0;
            for (bool first = true;; first = false) {
                // two tiles wait, or no head is left: the last one of a work tile is known by it
                const bool looks = count < 2 && h_idx < work().h_end;
                while (count < 2 && h_idx < work().h_end) look_at_tiles();
                // once for each work tile: when TAKEN_BEFORE tiles are left, or all if they are fewer
                const bool few = looks ? count <= TAKEN_BEFORE : count == TAKEN_BEFORE;
                if (elected && few && h_idx >= work().h_end) take_work_tile();
                if (first && elected) load_held(count > 0);
                if (count == 0) break;
                if (elected) load_tile(feed->found[place]);
                place = (place + 1) % FOUND, --count;
            }
            __syncwarp();
            next = work().next;
            work_at.advance(1);
        }
        q.acquire(work_at);
        if (elected) {
            work().block = END;
            mbarrier_arrive(q.full);
        }
    }

    // Takes the next work tile from the counter, some tiles before the end of this one
    static constexpr int TAKEN_BEFORE = 16;
    __device__ __forceinline__ void take_work_tile() const {
        work().next = gridDim.x + atomicInc(next_work, work_tiles() - 1);  // wraps to 0 after the last one
    }

    // Publishes the coordinates of a work tile
    __device__ __forceinline__ void begin_work_tile(int number) const {
        const WorkTile at = work_tile_of(number, work_tiles(), blocks(), q_heads, heads_in_l2);
        work().block = blocks() - 1 - at.block;
        work().h_begin = at.h_idx, work().h_end = at.h_idx + 1;
        work().h_idx = at.h_idx;
        work().b_idx = at.b_idx;
    }

    // Classifies the next 32 tiles of the head, one by each lane
    __device__ __forceinline__ void look_at_tiles() {
        const int first_q_tile = CONSUMERS * work().block;
        int begin = NO_TILE, end = 0;
        int full_begin = 0, full_end = 0;
        {  // the range of 64 rows by every CONSUMERS-th lane, then what they have in all
            const int q_tile = first_q_tile + threadIdx.x % CONSUMERS, q_lo = q_tile * BLOCK_Q;
            if (q_lo < q_len) {
                const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
                const KvRange range = kv_range(q_lo, q_hi, kv_len);
                if (range.begin < range.end) begin = range.begin / BLOCK_KV, end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
                full_begin = (range.full_begin + BLOCK_KV - 1) / BLOCK_KV, full_end = range.full_end / BLOCK_KV;
            }
            for (int lanes = 1; lanes < CONSUMERS; lanes *= 2) {
                begin = min(begin, __shfl_xor_sync(0xffffffff, begin, lanes));
                end = max(end, __shfl_xor_sync(0xffffffff, end, lanes));
            }
        }
        next_tile = max(next_tile, begin);
        const int kv_tile = next_tile + threadIdx.x;
        const bool visited = kv_tile < end;
        int partial = 0;  // a bit for each 64 rows for which the tile is not full
#pragma unroll 1
        for (int group = 0; group < CONSUMERS; ++group) {
            const int from = __shfl_sync(0xffffffff, full_begin, group), to = __shfl_sync(0xffffffff, full_end, group);
            partial |= (kv_tile < from || kv_tile >= to) << group;
        }
        const unsigned lanes = __ballot_sync(0xffffffff, visited);
        if (visited) {
            volatile Found& mine = feed->found[(place + count + __popc(lanes & ((1u << threadIdx.x) - 1))) % FOUND];
            mine.visit = visit_of(kv_tile, partial), mine.h_idx = h_idx;
        }
        __syncwarp();
        count += __popc(lanes), next_tile += 32;
        if (next_tile >= end) ++h_idx, next_tile = 0;
    }

    // Q and dO of the work tile. No other block reads these rows
    __device__ __forceinline__ void load_held(bool any) {
        volatile Work& at = work();
        at.any = any;
        q.load_async(0, {q_map, at.h_idx, at.b_idx}, at.block * BLOCK_ROWS, L2_EVICT_FIRST);
        dO.load_async(0, {do_map, at.h_idx, at.b_idx}, at.block * BLOCK_ROWS, L2_EVICT_FIRST);
    }

    // A tile to visit
    __device__ __forceinline__ void load_tile(const volatile Found& tile) {
        const int visit = tile.visit | (count == 1), h_idx = tile.h_idx;  // bit 0: consumers stop after this tile
        const int kv_lo = tile_of(visit) * BLOCK_KV, b_idx = work().b_idx;
        const int kv_h_idx = h_idx / (q_heads / kv_heads);
        k.acquire(tile_at);
        feed->visits[tile_at.index] = visit;
        k.load_async(tile_at.index, {k_map, kv_h_idx, b_idx}, kv_lo);
        v.load_async(tile_at.index, {v_map, kv_h_idx, b_idx}, kv_lo);
        tile_at.advance(STAGES);
    }
};

// A consumer thread's registers of the matrices: accumulators S, dP and dQ, operand dS.
struct Fragments {
    float S[BLOCK_KV / 2];   // s; then the factor of dP - delta, which is P itself for most scores
    float dP[BLOCK_KV / 2];
    float dQ[HEAD_DIM / 2];
    unsigned dS[BLOCK_KV / 16][4];
    float lse2[2], delta[2], offset[2];  // numbers of the lane's rows
};

// A consumer warpgroup: computes dQ of 64 rows. Each of its threads has the members in registers.
struct Consumer : Block {
    int consumer, lane;  // numbers: of this warpgroup among consumers, of this thread in its warp
    int lane_row;        // this lane's first row in the block; its second is 8 further
    unsigned q_operand, do_operand, k_operand, k_rows_operand, v_operand;  // stage 0's

    Fragments& frag;
    bool large;  // whether a row has large scores: its tiles count as partial

    // The current work tile, and the current tile
    int visit, q_lo, h_idx, b_idx;

    __device__ __forceinline__ Consumer(const Block& block, int number, Fragments& frag)
        : Block(block), consumer(number), frag(frag) {
        lane = threadIdx.x % 32;
        lane_row = WARPGROUP_ROWS * consumer + 16 * (threadIdx.x % 128 / 32) + lane / 4;
        q_operand = QTile{q.first.smem + consumer * WARPGROUP_ROWS * ROW_BYTES}.k_major();
        do_operand = DoTile{dO.first.smem + consumer * WARPGROUP_ROWS * ROW_BYTES}.k_major();
        k_operand = k.first.k_major(), k_rows_operand = k.first.mn_major(), v_operand = v.first.k_major();
    }

    // Issues S = Q K^T
    __device__ __forceinline__ void issue_scores() {
        const unsigned long long k_tile = smem_descriptor(k_operand + tile_at.index * (KTile::BYTES / 16));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
            const unsigned long long q_step = smem_descriptor(q_operand + QTile::k_major_step(step));
            wgmma_pairs(frag.S, q_step, k_tile + KTile::k_major_step(step), step > 0);
        }
        wgmma_commit();
    }

    // dP = dO V^T, issued
    __device__ __forceinline__ void issue_weight_gradients() {
        const unsigned long long v_tile = smem_descriptor(v_operand + tile_at.index * (VTile::BYTES / 16));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < V_STEPS; ++step) {
            const unsigned long long do_step = smem_descriptor(do_operand + DoTile::k_major_step(step));
            wgmma_pairs(frag.dP, do_step, v_tile + VTile::k_major_step(step), step > 0);
        }
        wgmma_commit();
    }

    // dQ += dS K, issued; softmax_scale is applied at the end
    __device__ __forceinline__ void issue_dq() {
        const unsigned long long k_tile = smem_descriptor(k_rows_operand + tile_at.index * (KTile::BYTES / 16));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_KV / 16; ++step)
            wgmma_dqk(frag.dQ, frag.dS[step], k_tile + KTile::mn_major_step(step), true);
        wgmma_commit();
    }

    // dS, the gradient of s, from S and dP, rounded
    template <bool PARTIAL> __device__ __forceinline__ void score_gradients() {
        const int kv_lo = tile_of(visit) * BLOCK_KV;
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; ++i) {
            const int key = lane % 4 * 2 + column_of(i);  // the key in the tile
            const int q_idx = q_lo + lane_row + 8 * row_in_pair(i);
            const int kv_idx = kv_lo + key;
            const float s = frag.S[i];
            float exponent = s;
            if constexpr (PARTIAL) exponent = (__fmul_rn(exponent, softmax_scale) - frag.offset[row_in_pair(i)]) * LOG2_E;
            else exponent *= EXPONENT_SCALE;
            float weight = fast_exp2(exponent - frag.lse2[row_in_pair(i)]);
            float slope = weight;
            if constexpr (PARTIAL) {
                if (kv_lo + key >= kv_len || !mask(q_idx, kv_idx)) weight = slope = 0.0f;
            }
            frag.S[i] = slope;
        }
        const auto gradient = [&](int i) {
            return PARTIAL && frag.S[i] == 0.0f ? 0.0f : frag.S[i] * (frag.dP[i] - frag.delta[row_in_pair(i)]);
        };
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; i += 2) frag.dS[i / 8][i / 2 % 4] = pack(gradient(i), gradient(i + 1));
    }

    // Whether the tile has no pairs that the mask excludes, or no NaN or infinity in K; the same for the four warps
    __device__ __forceinline__ bool multiplies_all_keys() const {
        if (!is_partial(visit, consumer)) return true;
        float zero = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; ++i)
            if (row_in_pair(i) == 0) zero = fmaf(frag.S[i], 0.0f, zero);
        return !__any_sync(0xffffffff, named_barrier_any(1 + consumer, 128, zero != 0.0f));  // the compiler knows this to be uniform
    }

    // dQ += dS K without the elements of K that are NaN or infinite, by products of a warp
    __device__ __forceinline__ void add_finite_keys() {
        const KTile keys = k.tile(tile_at.index);
#pragma unroll
        for (int step = 0; step < BLOCK_KV / 16; ++step)
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; i += 8) {  // 16 columns
                unsigned b[4];  // lane l points at row l % 16, columns 8 * (l / 16) of 16 x 16
                ldmatrix_x4_trans(b, keys.at(i / 32, 16 * step + lane % 16, i % 32 / 4 + lane / 16));
#pragma unroll
                for (int j = 0; j < 4; ++j) b[j] &= ~not_finite(b[j]);
                mma_16x8x16(frag.dQ + i, frag.dQ + i + 2, frag.dS[step], b[0], b[1]);
                if (i + 4 < HEAD_DIM / 2) mma_16x8x16(frag.dQ + i + 4, frag.dQ + i + 6, frag.dS[step], b[2], b[3]);
            }
    }

    // Reads what the producer has published of the current tile
    __device__ __forceinline__ void read_visit() {
        visit = __shfl_sync(0xffffffff, feed->visits[tile_at.index], 0);
        if (large) visit |= visit_of(0, 1 << consumer);
    }

    // One tile of keys, whose S and dP are there; LAST: no other follows in the work tile
    // ALL_KEYS: see multiplies_all_keys
    template <bool PARTIAL, bool LAST, bool ALL_KEYS = true> __device__ __forceinline__ void step() {
        if constexpr (LAST) q.release(work_at);  // and dO: their last products are there
        score_gradients<PARTIAL>();
        if constexpr (ALL_KEYS) issue_dq();
        else add_finite_keys();
        const Position done = tile_at;
        tile_at.advance(STAGES);
        if constexpr (!LAST) {
            k.wait_full(tile_at);
            read_visit();
            issue_scores();
            v.wait_full(tile_at);
            issue_weight_gradients();
            wgmma_wait<2>();
            k.release(done);  // K, and V too
            wgmma_wait<0>();
            wgmma_received(frag.S);
            wgmma_received(frag.dP);
        } else {
            wgmma_wait<0>();
            k.release(done);
        }
        wgmma_received(frag.dQ);
    }

    // All tiles of a work tile, and then the results dQ
    __device__ __forceinline__ void sum_tiles() {
        k.wait_full(tile_at);
        read_visit();
        issue_scores();
        dO.wait_full(work_at);
        v.wait_full(tile_at);
        issue_weight_gradients();
        wgmma_wait<0>();
        wgmma_received(frag.S);
        wgmma_received(frag.dP);
#pragma unroll 1
        while (!is_last(visit)) {
            if (!multiplies_all_keys()) step<true, false, false>();
            else if (is_partial(visit, consumer)) step<true, false>();
            else step<false, false>();
        }
        if (!multiplies_all_keys()) step<true, true, false>();
        else if (is_partial(visit, consumer)) step<true, true>();
        else step<false, true>();
    }

    // Every work tile
    __device__ __forceinline__ void compute() {
        for (;; work_at.advance(1)) {
            q.wait_full(work_at);
            const int q_block = __shfl_sync(0xffffffff, work().block, 0);
            if (q_block == END) break;
            h_idx = work().h_idx;
            b_idx = work().b_idx;
            const bool any = __shfl_sync(0xffffffff, work().any, 0);
            q_lo = q_block * BLOCK_ROWS;
            const int blocks = (q_len + BLOCK_ROWS - 1) / BLOCK_ROWS;
            const RowNumbers& of_tile = numbers[(((long long)b_idx * q_heads + h_idx) * blocks + q_block) * CONSUMERS + consumer];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = lane_row % BLOCK_Q + 8 * r;
                frag.lse2[r] = of_tile.lse2[row], frag.delta[r] = of_tile.delta[row], frag.offset[r] = of_tile.offset[row];
            }
            large = __any_sync(0xffffffff, of_tile.offset[lane] != 0.0f || of_tile.offset[lane + 32] != 0.0f);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; ++i) frag.dQ[i] = 0.0f;
            if (any) {
                sum_tiles();
            } else {
                dO.wait_full(work_at);
                q.release(work_at);
            }
            const int warp = thread_index() / 32 - 4, first_row = q_block * BLOCK_ROWS + 16 * warp;
            const OTile rows = {out.smem + warp * OTile::BYTES};
            store_rows<HEAD_DIM>(rows, dq_map, frag.dQ, softmax_scale, first_row, h_idx, b_idx);
        }
        if (lane == 0) tma_store_wait<0>();  // the copies read shared memory, which the block frees when it ends
    }
};

}  // namespace of_rows

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gpt2_backward_dq(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap do_map,
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    const __grid_constant__ TensorMap dq_map,
    const RowNumbers* __restrict__ numbers,  // [batch, q_heads, ceil(q_len / 128), 2, 3, 64]
    unsigned* next_work,  // [1]
    int batch, int q_heads, int kv_heads, int q_len, int kv_len,
    int heads_in_l2)  // query heads whose blocks are numbered together
{
    extern __shared__ __align__(1024) unsigned char smem[];

    unsigned long long* const barriers = (unsigned long long*)(smem + BARRIERS_SMEM);
    const of_rows::Block block = {
        &q_map, &do_map, &k_map, &v_map, &dq_map,
        numbers,
        next_work,
        batch, q_heads, kv_heads, q_len, kv_len, heads_in_l2,
        {{{smem + HELD_QK_SMEM}, barriers}, barriers + 1},
        {{smem + HELD_V_SMEM}, barriers + 2},
        {{{smem + VISITED_QK_SMEM}, barriers + 4}, barriers + 4 + STAGES},
        {{smem + VISITED_V_SMEM}, barriers + 4 + 2 * STAGES},
        {smem + OUT_SMEM},
        (volatile TileFeed*)(smem + VISITS_SMEM),
    };
    block.set_up();

    // The shuffle tells the compiler that all lanes of a warp have the same value, which it cannot see of threadIdx.x / 128. It
    // then branches once for all lanes, and keeps values that depend on the warpgroup in uniform registers
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        give_registers<40>();
        of_rows::Producer producer = {block};
        if (threadIdx.x < 32) producer.load();
    } else {
        take_registers<232>();
        // Not members of Consumer: the compiler keeps an object with arrays in registers only if loops over these are unrolled
        of_rows::Fragments frag;
        of_rows::Consumer consumer(block, warpgroup - 1, frag);
        consumer.compute();
    }
}
