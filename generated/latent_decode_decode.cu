// latent_decode, decode
// =====================
//
//     attention latent_decode {
//         dtype     bf16
//         head_dim  576
//         values    k[0:512]
//         heads     128 over 1
//         scale     0.07216878364870323
//         mask      q + kv_len - q_len >= k
//         output    lse
//     }
//
// For batch b, query head h and query row q, with the key/value head h / group_size:
//
//     s    = 0.07216878364870323 * sum over d of Q[q, d] * K[k, d]
//     V    = K[:, 0:512]
//     S[k] = s where q + kv_len - q_len >= k, else -inf
//     P[k] = exp(S[k]) / (sum over k of exp(S[k]))
//     lse  = log(sum over k of exp(S[k]))
//     O[d] = sum over k of P[k] * V[k, d]
//
// Shapes
//     Q    bf16 [batch, 128, q_len, 576]
//     K    bf16 [batch, 1, kv_len, 576]
//     V    bf16 [batch, 1, kv_len, 512]
//     O    bf16 [batch, 128, q_len, 512], written
//     lse  fp32 [batch, 128, q_len], written
//     split_O fp32 [batch, 128, q_len, splits, 512], workspace
//     split_max fp32 [batch, 128, q_len, splits], workspace
//     split_sum fp32 [batch, 128, q_len, splits], workspace
//
// Plan, for sm_90a (Hopper: H100, H200)
//     schedule = decode: bf16 on tensor cores by wgmma, which sm_90a has, for few rows and many keys, where a key
//         head has rows for a product of 64
//     auto takes it = for calls of at most 16 query rows and at least 256 keys, with at least 64 rows for each key
//         head: so many rows need more products for each key that is read than mma.sync computes in the time of
//         reading it
//     rows = those of all heads that share keys: keys are read once for 64 of them; a product has as many rows even
//         if there are fewer
//     warpgroups = 1 + 2: one copies; O of 64 rows is too wide for the registers of one, so two have half of its
//         columns each; they compute weights in turn
//     BLOCK_Q x BLOCK_KV = 64 x 64: the rows of a product, and keys of which two tiles fit shared memory beside Q
//     stages = 2: one for each consumer
//     registers = 24 and 240 a thread: of the producer and of the consumers, which have half of O, S and P
//     Q = 2 slabs in registers, the others in shared memory: weights are handed on in their place, and their
//         products read one operand in shared memory, not two
//     splits = by sizes and multiprocessors: as many as keep all multiprocessors reading keys until the end
//     V = in the tiles of K: V is a part of K: its columns are copied once, and read as keys and as values
//     K = copied by TMA, slab by slab: a slab is copied as soon as both products of V have read its place, and
//         multiplied as soon as it is there
//     launch = programmatic dependent launch: blocks start before the previous kernel ends and wait for its end,
//         which saves the time between kernels
//     partial results = O before division by l, with m and l: as exact as without splits; an lse instead of m and l
//         would lose the last bits of l if m is large
//     swizzle = 128 bytes: Q, K and V in slabs of 64 columns, 128 bytes a row, their chunks of 16 bytes permuted, so
//         that neither TMA nor wgmma meets a bank conflict
//
// Shared memory of a block, 222512 bytes
//          0  K        bf16 [2][9][64][64], the keys of 2 tiles, which have the values
//     147456  Q        bf16 [9][64][64], the block's rows; P of 2 tiles in place of the last slabs
//     221184  MAX      float [2][64], the maxima of rows, of the latest tile of each consumer
//     221696  SUM      float [2][64], the sums of weights, of each consumer
//     222208  BARRIERS mbarrier [38], see the kernel
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. This variant's score and mask
//     4. Which tiles are visited
//     5. Loading tiles
//     6. The keys of a split
//     7. The join of all splits

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 576;
constexpr int HEAD_DIM_V = 512;
constexpr int q_heads = 128;
constexpr int kv_heads = 1;
constexpr float softmax_scale = 0.07216878364870323f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float EXPONENT_SCALE = softmax_scale * LOG2_E;  // exp(softmax_scale x) = 2^(EXPONENT_SCALE x)
constexpr int BLOCK_Q = 64;  // rows of a block, of the query heads that share keys
constexpr int BLOCK_KV = 64;  // keys of a tile
constexpr int THREADS = 384;
constexpr int CONSUMERS = 2;  // warpgroups that multiply, for the same rows
constexpr int WRITERS = 128 * CONSUMERS;  // threads that write results
constexpr int BOTH = 1;  // the named barrier of both consumers; the next ones are those of each
constexpr int STAGES = CONSUMERS;  // tiles of K in shared memory, one for each consumer
constexpr int PRODUCER_REGISTERS = 24;  // of a thread
constexpr int CONSUMER_REGISTERS = 240;
constexpr int K_SMEM = 0;
constexpr int Q_SMEM = 147456;
constexpr int MAX_SMEM = 221184;
constexpr int SUM_SMEM = 221696;
constexpr int BARRIERS_SMEM = 222208;
constexpr float RESCALE_THRESHOLD = 8.0f;  // an exponent may exceed that of the maximum in use by this much: a factor of 2^8
constexpr float LARGE = 65536.0f;  // above this magnitude, fp32 rounds maximum * EXPONENT_SCALE too coarsely
constexpr int VALUES_BEGIN = 0;  // the column of K that is the first of V
constexpr int V_COLUMNS = HEAD_DIM_V / CONSUMERS;  // columns of O of a consumer
constexpr int V_PARTS = V_COLUMNS / 64;  // slabs of V of a consumer
constexpr int ROW_THREADS = 32;  // the block's threads as a grid over a tile: its rows
constexpr int COLUMN_THREADS = 4;  // and its columns
constexpr int ROWS = BLOCK_Q / ROW_THREADS;  // of a thread
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;  // keys of a thread in a tile
constexpr int DIMS = V_COLUMNS / COLUMN_THREADS;  // dimensions of O of a thread
constexpr int ROW_BYTES = 128;  // a row of a slab: 64 columns of a tile
constexpr int QK_SLABS = 9;
constexpr int V_SLABS = 8;
constexpr int HELD_SLABS = 2;  // slabs of Q in registers, the last ones
constexpr int READ_SLABS = QK_SLABS - HELD_SLABS;  // those in shared memory
constexpr int WEIGHTS_SMEM = Q_SMEM + READ_SLABS * BLOCK_Q * ROW_BYTES;  // weights of each consumer, where slabs of Q were
constexpr int O_STRIDE = HEAD_DIM_V + 8;  // of sums of O, in the memory of K and Q
constexpr int QUADS = HEAD_DIM_V / 4;  // of neighbouring columns of O
constexpr int JOINING = 512;  // threads of a block that joins splits

// 2. Primitives

// bf16: the upper half of an fp32 (1 sign, 8 exponent, 7 fraction bits).
struct bf16 { unsigned short bits; };

// Two neighbouring elements of a fragment in one register, `low` in the lower half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
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

// Waits until the kernels before this one have ended and what they wrote is visible. Launched with programmatic stream
// serialization, a kernel may start earlier: it touches no global memory before this.
__device__ __forceinline__ void wait_for_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel may start as soon as all blocks have come here or have ended.
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// Copies 16 bytes from global to shared memory in the background; if `inside` is false it writes zeros and reads nothing.
__device__ __forceinline__ void cp_async_16(void* to_smem, const void* from_gmem, bool inside) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(to_smem);
    const int bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from_gmem), "r"(bytes) : "memory");
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are still under way.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
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

// Loads four 8x8 matrices of 16-bit elements from shared memory: lane i gives the address of a row (row i % 8 of matrix i / 8)
// and receives, of each matrix, elements [lane / 4][2 * (lane % 4)] and the next one.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row_smem) {
    const unsigned row = (unsigned)__cvta_generic_to_shared(row_smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
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

// `x` of WIDTH neighbouring lanes combined, known to all of them.
template <int WIDTH, typename Combine> __device__ __forceinline__ float lane_reduce(float x, Combine combine) {
    for (int lanes = WIDTH / 2; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, lanes));
    return x;
}

// D = A B, or D += A B if `accumulate`: A is 64x16, B 16x64, D in fp32. Thread t of the warpgroup has in
//   d[4 * j + 2 * h + e]: D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e]
// A is K-major in shared memory.
// B is K-major in shared memory.
__device__ __forceinline__ void wgmma_qk(float (&d)[32], unsigned long long a, unsigned long long b,
                                         bool accumulate) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
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

// D = A B, or D += A B if `accumulate`: A is 64x16, B 16x256, D in fp32. Thread t of the warpgroup has in
//   d[4 * j + 2 * h + e]: D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e]
//   a[2 * i + h]: A[16 * (t / 32) + t % 32 / 4 + 8 * h][2 * (t % 4) + 8 * i] and the next column
// B is MN-major in shared memory.
__device__ __forceinline__ void wgmma_pv(float (&d)[128], const unsigned (&a)[4], unsigned long long b,
                                         bool accumulate) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
        "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
        "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
        "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "
        "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "
        "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "
        "%120, %121, %122, %123, %124, %125, %126, %127}, "
        "{ %128, %129, %130, %131}, %132, p, 1, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));
}

// D = A B, or D += A B if `accumulate`: A is 64x16, B 16x64, D in fp32. Thread t of the warpgroup has in
//   d[4 * j + 2 * h + e]: D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e]
//   a[2 * i + h]: A[16 * (t / 32) + t % 32 / 4 + 8 * h][2 * (t % 4) + 8 * i] and the next column
// B is K-major in shared memory.
__device__ __forceinline__ void wgmma_qk_held(float (&d)[32], const unsigned (&a)[4], unsigned long long b,
                                         bool accumulate) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
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

// D = A B, or D += A B if `accumulate`: A is 64x16, B 16x256, D in fp32. Thread t of the warpgroup has in
//   d[4 * j + 2 * h + e]: D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e]
// A is K-major in shared memory.
// B is MN-major in shared memory.
__device__ __forceinline__ void wgmma_pv_shared(float (&d)[128], unsigned long long a, unsigned long long b,
                                         bool accumulate) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
        "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
        "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
        "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "
        "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "
        "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "
        "%120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, p, 1, 1, 0, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
        : "l"(a), "l"(b), "r"((int)accumulate));
}

// 3. This variant's score and mask

// allowed: q + kv_len - q_len >= k
__device__ __forceinline__ bool mask(int q_idx, int kv_idx, int q_len, int kv_len) {
    return q_idx + kv_len - q_len >= kv_idx;
}

// 4. Which tiles are visited
//
// Indices outside a range are not visited: no pair of theirs is allowed.

struct KvRange {
    int begin, end;  // keys outside are forbidden for every row of the block
    int full_begin, full_end;  // keys inside are allowed for every row
};

// The range for rows q_lo to q_hi, solved from q + kv_len - q_len >= k.
__device__ __forceinline__ KvRange kv_range(int q_lo, int q_hi, int q_len, int kv_len) {
    return {
        0,  // begin
        max(min(kv_len, q_hi + kv_len - q_len + 1), 0),  // end
        0,  // full_begin
        max(min(kv_len, q_lo + kv_len - q_len + 1), 0),  // full_end
    };
}

// 5. Loading tiles

// The rows of K or V of one head in global memory. All loads of them go through it: nothing else knows how they are stored.
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

// A place in a ring of stages: the stage, and the parity of the current phase of its mbarriers, which flips each time the
// position passes the end of the ring.
struct Position {
    int index = 0;
    unsigned phase = 0;

    __device__ __forceinline__ void advance(int stages) {
        if (++index == stages) index = 0, phase ^= 1;
    }
};

// A tile in shared memory that is copied in parts: ROW_PARTS times COLUMN_PARTS of them, those of the first rows first. Each is
// some slabs side by side, and an operand of its own; if slabs cannot be dealt out evenly, later columns have more.
template <int TILE_ROWS, int SLABS, int ROW_PARTS, int COLUMN_PARTS> struct TileInParts {
    using Slab = SlabTile<TILE_ROWS / ROW_PARTS, 1>;
    static constexpr int PARTS = ROW_PARTS * COLUMN_PARTS, BYTES = ROW_PARTS * SLABS * Slab::BYTES;
    unsigned char* smem;

    // Of a part: its first row and slab in the tile, how many slabs it has, and where it is, in bytes
    __device__ static constexpr int first_row(int part) { return part / COLUMN_PARTS * (TILE_ROWS / ROW_PARTS); }
    __device__ static constexpr int first_slab(int part) { return part % COLUMN_PARTS * SLABS / COLUMN_PARTS; }
    __device__ static constexpr int slabs(int part) {
        return (part % COLUMN_PARTS + 1) * SLABS / COLUMN_PARTS - first_slab(part);
    }
    __device__ static constexpr int place(int part) {
        return (part / COLUMN_PARTS * SLABS + first_slab(part)) * Slab::BYTES;
    }
    // The first part as an operand: those of SlabTile, whose steps lie in the slabs of a part
    __device__ __forceinline__ unsigned k_major() const { return smem_operand(smem, 0); }
    __device__ __forceinline__ unsigned mn_major() const { return smem_operand(smem, Slab::BYTES); }
};

// A pipeline of such tiles, with a pair of mbarriers for each part of a stage: those of the first parts of all stages, then those
// of the second ones.
template <typename Tile> struct PipelineInParts {
    Tile first;                          // the tile of stage 0
    unsigned long long *full, *empty;    // [PARTS][STAGES]

    __device__ __forceinline__ Tile tile(int stage) const { return {first.smem + stage * Tile::BYTES}; }
    // The producer, before it copies a part: waits until it is empty
    __device__ __forceinline__ void acquire(const Position& at, int part = 0) const {
        mbarrier_wait(empty + part * STAGES + at.index, at.phase ^ 1);
    }
    __device__ __forceinline__ void wait_full(const Position& at, int part = 0) const {
        mbarrier_wait(full + part * STAGES + at.index, at.phase);
    }
    // A reader, when it has read the part
    __device__ __forceinline__ void release(const Position& at, int part = 0) const {
        mbarrier_arrive(empty + part * STAGES + at.index);
    }
    // One thread, when the first part is empty: copies a tile, of which `row` is the first row, each part as soon as it is empty
    __device__ __forceinline__ void load_async(const Position& at, const HeadRows& rows, int row) const {
#pragma unroll 1
        for (int number = 0; number < Tile::PARTS; ++number) {
            if (number > 0) acquire(at, number);
            unsigned long long* const its_full = full + number * STAGES + at.index;
            unsigned char* const part_smem = tile(at.index).smem + Tile::place(number);
            const int slabs = Tile::slabs(number);
            mbarrier_expect_bytes(its_full, slabs * Tile::Slab::BYTES);
            for (int slab = 0; slab < slabs; ++slab)
                rows.load_async(part_smem + slab * Tile::Slab::BYTES, its_full, 64 * (Tile::first_slab(number) + slab),
                                row + Tile::first_row(number), L2_EVICT_LAST);
        }
    }
};
using QTile = SlabTile<BLOCK_Q, QK_SLABS>;
using KTile = TileInParts<BLOCK_KV, QK_SLABS, 1, QK_SLABS>;  // a part is a slab: keys of 64 columns
using WeightTile = SlabTile<BLOCK_Q, BLOCK_KV / 64>;

// 6. The keys of a split
//
//     S[q, k] = s  where q + kv_len - q_len >= k, else -inf
//     with s = softmax_scale * sum over d of Q[q, d] * K[k, d]
//
//     m = -inf, l = 0, O = 0; for every tile of keys:
//         S  = score(Q K^T)                     -inf where the mask forbids
//         m' = max(m, row maximum of S)
//         P  = exp(S - m')
//         l  = l * exp(m - m') + row sum of P
//         O  = O * exp(m - m') + P V
//         m  = m'
//     O = O / l;  lse = m + log(l)
//
// A block computes this for 64 rows and the keys of one split, and writes O before the division by l, m and l.
// One warpgroup copies keys. O is too wide for the registers of a warpgroup: two others, the consumers, have half of its columns
// each. They take turns with tiles of keys: the first computes the softmax of the tiles with even numbers, the second of the
// odd ones. Each multiplies the weights of every tile with its own half of the columns of V: its own weights from registers, the
// other's from shared memory. While one computes the softmax, the tensor cores multiply for the other:
//
//     producer           K0  K1         K2  K3                      each slab as soon as its place is empty
//     first consumer     Q K0 | softmax | P0 V0 | P1 V1 | Q K2 | softmax | P2 V2 | P3 V3 ...
//     second consumer      Q K1, P0 V0 | softmax | P1 V1 |   Q K3, P2 V2 | softmax | P3 V3 ...
//
// V is columns 0 to 511 of K: the tile of K is read as that of V, and its slabs are empty when both products have read them.
// Fragments of S and O: of the 16 rows of a product, lane l holds rows l / 4 and l / 4 + 8; of every 8 columns, columns
// 2 * (l % 4) and the next. The four lanes with the same l / 4 share a row.

// The largest of four numbers, of the lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// The sum of four numbers, of the lanes that share a row.
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Sets a row's maximum to `new_max`, which is at least the old one, and `alpha` to exp(old - new), by which sums under the old
// maximum must be multiplied. Returns the maximum to subtract from scores.
__device__ __forceinline__ float raise_max(float& row_max, float& alpha, float new_max) {
    const float shift = new_max == -INF ? 0.0f : new_max;  // no key yet: exp(-inf - 0) = 0, not NaN
    alpha = fast_exp2((row_max - shift) * EXPONENT_SCALE);
    row_max = new_max;
    return shift;
}

// The online softmax of a thread's rows. S is a fragment, with the scores of a tile in these rows. For each tile the caller
// calls find_largest, raise_maxima and compute_weights; if raise_maxima returns true, it multiplies O by alpha. After the
// last tile, the four lanes that share a row add their sums.
struct RowSoftmax {
    float max[ROWS];      // the maximum in use, which may be less than the largest score
    float alpha[ROWS];    // the factor for sums under the previous maximum
    float largest[ROWS];  // this lane's largest score of the tile, or the maximum if that is larger
    float sum[ROWS];      // this thread's weights; after the last tile, the row's

    // The row, 0 to ROWS - 1, of register i of N: a pair of rows has 2 * N / ROWS of them, two in turn for each
    template <int N> static __device__ constexpr int row_of(int i) { return i / (2 * N / ROWS) * 2 + i / 2 % 2; }

    // Row r before its first tile
    __device__ __forceinline__ void begin(int r) {
        max[r] = -INF;
        sum[r] = 0.0f;
    }

    // Of row r: the largest score that does not change the maximum, and what is subtracted from exponents
    __device__ __forceinline__ float limit(int r) const {
        if (is_large(max[r])) return -INF;  // every tile subtracts it from its scores
        return max[r] + RESCALE_THRESHOLD / EXPONENT_SCALE;
    }
    __device__ __forceinline__ float shift_of(int r) const {
        // 0: no key yet; or a large maximum, which was subtracted
        return is_large(max[r]) ? 0.0f : max[r] * EXPONENT_SCALE;
    }

    // Whether a maximum is so large that it is subtracted from the scores before they are scaled, which is exact
    static __device__ __forceinline__ bool is_large(float maximum) { return fabsf(maximum * EXPONENT_SCALE) > LARGE; }

    // Finds the largest score that this lane has of each row
    template <int N> __device__ __forceinline__ void find_largest(const float (&S)[N]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) largest[r] = max[r];
#pragma unroll
        for (int i = 0; i < N; i += 2) largest[row_of<N>(i)] = fmaxf(largest[row_of<N>(i)], fmaxf(S[i], S[i + 1]));
    }

    // Raises the maxima if a score of the tile exceeds its limit. Returns whether it did: the caller then multiplies O by alpha
    template <int N> __device__ __forceinline__ bool raise_maxima(float (&S)[N]) {
        bool exceeds = false;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) exceeds |= largest[r] > limit(r);
        const bool rescale = __any_sync(0xffffffff, exceeds);
        if (rescale) raise(S);
        return rescale;
    }

    // Raises the maximum of each row to the largest of its scores so far, over the lanes that share the row
    template <int N> __device__ __forceinline__ void raise(float (&S)[N]) {
        float offset[ROWS];  // subtracted from the scores
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float subtracted = raise_max(max[r], alpha[r], quad_max(largest[r]));
            const bool large = is_large(subtracted);
            offset[r] = large ? subtracted : 0.0f;
            sum[r] *= alpha[r];
        }
        // A row with a large maximum comes here in each tile, because its limit is -INF
        bool any = false;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) any |= offset[r] != 0.0f;
        if (__any_sync(0xffffffff, any)) {
#pragma unroll
            for (int i = 0; i < N; ++i) S[i] -= offset[row_of<N>(i)];
        }
    }

    // Replaces the scores of a tile by its weights
    template <int N> __device__ __forceinline__ void compute_weights(float (&S)[N]) {
        float shift[ROWS];  // this tile's
#pragma unroll
        for (int r = 0; r < ROWS; ++r) shift[r] = shift_of(r);
        float sums[ROWS][2] = {};  // two chains of additions for each row, so that additions wait less for each other
#pragma unroll
        for (int i = 0; i < N; ++i) {
            S[i] = fast_exp2(S[i] * EXPONENT_SCALE - shift[row_of<N>(i)]);
            sums[row_of<N>(i)][i % 2] += S[i];
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] += sums[r][0] + sums[r][1];
    }
};

// A thread's elements of S or O: [r][j] is the one in its row r and its column j. `d` has them in the order of mma's registers:
// for each pair of columns, the pair of the upper row of 16, then that of the lower.
template <int COLUMNS> struct Fragment {
    struct Row {
        float* d;
        __device__ __forceinline__ float& operator[](int j) const { return d[j / 2 * 4 + j % 2]; }
    };
    float d[ROWS * COLUMNS];
    __device__ __forceinline__ Row operator[](int r) { return {d + r / 2 * (2 * COLUMNS) + r % 2 * 2}; }
};
struct alignas(16) Quad {  // neighbouring columns of O
    float at[4];
};
struct alignas(8) Pair {  // neighbouring columns of a row
    float even, odd;
};

// What the roles of a block share: the arguments of the call, its rows and tiles, and shared memory with its mbarriers.
struct Block {
    const TensorMap *k_map;
    const bf16* Q;
    bf16* O;
    float* split_O;
    float* split_max;
    float* split_sum;
    long long q_stride_b, q_stride_h, q_stride_s, o_stride_b, o_stride_h, o_stride_s;
    float* lse;
    long long lse_stride_b, lse_stride_h, lse_stride_s;
    int q_len, kv_len, splits;

    const bf16* q_first;  // row 0 of the first head
    unsigned first_row;
    int block_rows, group_size, first_head, b_idx;
    int first_tile, tile_step, tiles, full_tile_begin, full_tile_end;  // the block's tiles, and those that are full
    QTile q;
    // full and empty of each slab of a stage. Its readers are one warpgroup after the other; the last one releases it
    PipelineInParts<KTile> k;
    // The weights of a tile of each consumer, [CONSUMERS], with the maxima of its rows. handed_on[i]: consumer i has written them
    WeightTile weights;
    float *max_smem, *sum_smem, *O_smem;  // [CONSUMERS][BLOCK_Q], the same, [BLOCK_Q][O_STRIDE]
    unsigned long long* handed_on;

    // Both consumers: copy Q. Rows past the last one are zeros
    __device__ __forceinline__ void copy_queries() const {
        for (int i = threadIdx.x; i < BLOCK_Q * (HEAD_DIM / 8); i += WRITERS) {
            const int r = i / (HEAD_DIM / 8), chunk = i % (HEAD_DIM / 8);
            const unsigned row = first_row + r;
            const bf16* from = q_first + row % group_size * q_stride_h + row / group_size * q_stride_s + 8 * chunk;
            cp_async_16(q.at(chunk / 8, r, chunk % 8), from, r < block_rows);
        }
        cp_async_commit();
        cp_async_wait<0>();
        async_proxy_fence();  // wgmma reads what threads copied
        named_barrier_sync(BOTH, WRITERS);  // Q is complete
    }

    // A consumer, the first or the second. Each thread has two rows of S and O. In the end O and the sums of its weights are in
    // shared memory
    template <int CONSUMER> __device__ __forceinline__ void compute() const {
        constexpr int OTHER = 1 - CONSUMER;
        const int lane = threadIdx.x % 32, thread = threadIdx.x % 128, warp_row = thread / 32 * 16, own_row = warp_row + lane / 4;
        copy_queries();
        // The last slabs of Q, operands in registers: weights are handed on where they were
        unsigned Q_frag[4 * HELD_SLABS][4];
#pragma unroll
        for (int step = 0; step < 4 * HELD_SLABS; ++step)
            ldmatrix_x4(Q_frag[step], q.at(READ_SLABS + step / 4, warp_row + lane % 16, step % 4 * 2 + lane / 16));
        named_barrier_sync(BOTH, WRITERS);  // both consumers have read them
        // The indices of a thread's rows; those past the last one are read as the last
        int q_idx_of[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            const unsigned row = first_row + min(own_row + 8 * r, block_rows - 1);
            q_idx_of[r] = row / group_size;
        }
        Fragment<DIMS> O_frag = {};
        RowSoftmax softmax;
        for (int r = 0; r < ROWS; ++r) {
            softmax.begin(r);
        }
        Fragment<COLUMNS> S_frag;
        unsigned P_frag[BLOCK_KV / 16][4];
        // Operands: Q, the keys of the own stage, the own columns of V in both stages, the weights of the other consumer
        const unsigned q_operand = q.k_major(), k_operand = k.tile(CONSUMER).k_major();
        const auto values_of = [&](int stage) {
            constexpr int FIRST = VALUES_BEGIN / 64 + CONSUMER * V_PARTS;
            return smem_descriptor(KTile{k.tile(stage).smem + KTile::place(FIRST)}.mn_major());
        };
        const unsigned long long own_values = values_of(CONSUMER), other_values = values_of(OTHER);
        const WeightTile own_weights = {weights.smem + CONSUMER * WeightTile::BYTES};
        const unsigned long long other_weights = smem_descriptor(WeightTile{weights.smem + OTHER * WeightTile::BYTES}.k_major());

        // O, multiplied by the factors of its rows, which follow from a raised maximum
        const auto rescale = [&] {
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < DIMS; ++c) O_frag[r][c] *= softmax.alpha[r];
        };
        // The own columns of V in a stage are read
        const auto release_values = [&](int stage) {
            if (thread < V_PARTS) k.release(Position{stage, 0}, VALUES_BEGIN / 64 + CONSUMER * V_PARTS + thread);
        };
        // Waits for the other consumer's weights of a tile, and takes over its maxima. No product of O is under way
        const auto take = [&](unsigned phase) {
            mbarrier_wait(handed_on + OTHER, phase);
            float theirs[ROWS];
            bool raised = false;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                theirs[r] = max_smem[OTHER * BLOCK_Q + own_row + 8 * r];
                raised |= theirs[r] != softmax.max[r];
            }
            if (__any_sync(0xffffffff, raised)) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    raise_max(softmax.max[r], softmax.alpha[r], theirs[r]);
                    softmax.sum[r] *= softmax.alpha[r];
                }
                rescale();
            }
        };
        // Issues O += P V with the other consumer's weights
        const auto multiply_theirs = [&] {
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < BLOCK_KV / 16; ++step)
                wgmma_pv_shared(O_frag.d, other_weights + WeightTile::k_major_step(step),
                                other_values + KTile::Slab::mn_major_step(step), true);
            wgmma_commit();
        };

        unsigned phase = 0;  // the own stage's; the other's is the same for the second consumer, else that before
#pragma unroll 1
        for (int i = CONSUMER; i < tiles; i += CONSUMERS, phase ^= 1) {
            if constexpr (CONSUMER == 0) {
                if (i > 0) {
                    take(phase ^ 1);
                    multiply_theirs();
                }
            }
            // S = Q K^T, slab by slab as keys arrive
            const Position own = {CONSUMER, phase};
#pragma unroll
            for (int slab = 0; slab < QK_SLABS; ++slab) {
                k.wait_full(own, slab);
                const unsigned queries = opaque(q_operand) + slab * (QTile::SLAB_BYTES / 16);
                const unsigned keys = opaque(k_operand) + KTile::place(slab) / 16;
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    const unsigned long long its_keys = smem_descriptor(keys + KTile::Slab::k_major_step(step));
                    if (slab < READ_SLABS)
                        wgmma_qk(S_frag.d, smem_descriptor(queries + QTile::k_major_step(step)), its_keys, slab + step > 0);
                    else wgmma_qk_held(S_frag.d, Q_frag[4 * (slab - READ_SLABS) + step], its_keys, slab + step > 0);
                }
                wgmma_commit();
                if constexpr (CONSUMER == 0) {
                    if (slab > 0) continue;
                    wgmma_wait<1>();  // the product before, of the other's weights
                    if (i > 0) release_values(OTHER);
                }
            }
            if constexpr (CONSUMER == 1) {
                take(phase);
                multiply_theirs();
            }
            wgmma_wait<CONSUMER>();  // S is there; of the second consumer the product of O runs on
            wgmma_received(S_frag.d);
            // Slabs that are no values
            if (thread < QK_SLABS - V_SLABS) k.release(own, thread < VALUES_BEGIN / 64 ? thread : thread + V_SLABS);

            const int tile = first_tile + i * tile_step, kv_lo = tile * BLOCK_KV;
            const bool partial = tile < full_tile_begin || tile >= full_tile_end;
            // Columns of S_frag's elements, from the lane's number: kept from tile to tile, they would cost registers
            const int first_column = thread_index() % 4 * 2;
            const auto column_of = [&](int j) { return first_column + j / 2 * 8 + j % 2; };
            if (partial) {  // the pairs that the mask forbids, and keys past the end
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j) {
                        const int q_idx = q_idx_of[r];
                        const int kv_idx = kv_lo + column_of(j);
                        const bool allowed = mask(q_idx, kv_idx, q_len, kv_len);
                        if (kv_idx >= kv_len || !allowed) S_frag[r][j] = -INF;
                    }
            }
            softmax.find_largest(S_frag.d);
            const bool rescales = softmax.raise_maxima(S_frag.d);
            softmax.compute_weights(S_frag.d);  // the weights P take the place of S
            if constexpr (CONSUMER == 1) {
                wgmma_wait<0>();
                wgmma_received(O_frag.d);
                release_values(OTHER);
            }
            if (rescales) rescale();

            // P as the A operand of P V: the fragments of S, rounded
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 4; ++j) P_frag[j / 4][j % 4] = pack(S_frag.d[2 * j], S_frag.d[2 * j + 1]);
            // Hands it on. The other has multiplied what was there before it handed on the weights of the tile before this one
#pragma unroll
            for (int step = 0; step < BLOCK_KV / 16; ++step)
                stmatrix_x4(own_weights.at(step / 4, warp_row + lane % 16, step % 4 * 2 + lane / 16), P_frag[step][0], P_frag[step][1],
                            P_frag[step][2], P_frag[step][3]);
            if (lane % 4 == 0) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r) max_smem[CONSUMER * BLOCK_Q + own_row + 8 * r] = softmax.max[r];
            }
            async_proxy_fence();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(handed_on + CONSUMER);

            // O += P V with the own weights
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < BLOCK_KV / 16; ++step)
                wgmma_pv(O_frag.d, P_frag[step], own_values + KTile::Slab::mn_major_step(step), true);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_received(O_frag.d);
            release_values(CONSUMER);
        }
        if (tiles > 0 && (tiles - 1) % CONSUMERS == OTHER) {  // the last tile is the other's
            take((tiles - 1) / CONSUMERS % 2);
            multiply_theirs();
            wgmma_wait<0>();
            wgmma_received(O_frag.d);
        }

        named_barrier_sync(BOTH, WRITERS);  // all products have read K, Q and P: O takes their place
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = own_row + 8 * r;
            Pair* o_row = (Pair*)(O_smem + row * O_STRIDE + CONSUMER * V_COLUMNS + lane % 4 * 2);
#pragma unroll
            for (int j = 0; j < V_COLUMNS / 8; ++j) o_row[4 * j] = Pair{O_frag[r][2 * j], O_frag[r][2 * j + 1]};
            const float row_sum = quad_sum(softmax.sum[r]);
            if (lane % 4 == 0) {
                sum_smem[CONSUMER * BLOCK_Q + row] = row_sum;
                if constexpr (CONSUMER == 0) max_smem[row] = softmax.max[r];
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
latent_decode_split(
    const __grid_constant__ TensorMap k_map,
    const bf16* __restrict__ Q,  // [batch, 128, q_len, 576]
    bf16* O,  // [batch, 128, q_len, 512]
    float* split_O,  // [batch, 128, q_len, splits, 512]
    float* split_max,  // [batch, 128, q_len, splits]
    float* split_sum,  // [batch, 128, q_len, splits]
    long long q_stride_b, long long q_stride_h, long long q_stride_s,
    long long o_stride_b, long long o_stride_h, long long o_stride_s,
    float* lse,  // [batch, 128, q_len]
    long long lse_stride_b, long long lse_stride_h, long long lse_stride_s,
    int q_len, int kv_len,
    int splits)  // blocks over which the keys of a tile of rows are split
{
    extern __shared__ __align__(1024) unsigned char smem[];
    // The rows of all query heads that share a key head are numbered together: row i = q * group_size + g is row q of the g-th
    // of these heads. The rows of a tile then have few positions q, and visit few keys that only some of them need
    const int group_size = q_heads / kv_heads;
    const unsigned rows = (unsigned)q_len * group_size, row_tiles = (rows + BLOCK_Q - 1) / BLOCK_Q;
    unsigned block = blockIdx.x;
    const unsigned first_row = block % row_tiles * BLOCK_Q;
    block /= row_tiles;
    const int split = block % splits;
    block /= splits;
    const int kv_h_idx = block % kv_heads, b_idx = block / kv_heads;
    const int first_head = kv_h_idx * group_size;  // the first query head that shares it
    wait_for_kernels_before();  // they write what this one reads, and read what it writes
    let_next_kernel_start();
    const int block_rows = min((unsigned)BLOCK_Q, rows - first_row);
    const auto part_of = [&](int r) {  // where the partial result of a row of the block is written
        const unsigned row = first_row + r;
        const int head = first_head + row % group_size;
        return (((long long)b_idx * q_heads + head) * q_len + row / group_size) * splits + split;
    };

    const int q_lo = first_row / group_size;
    const int q_hi = (first_row + block_rows - 1) / group_size;
    const KvRange range = kv_range(q_lo, q_hi, q_len, kv_len);
    const int tile_begin = range.begin / BLOCK_KV, tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;

    const int first_tile = tile_begin + split, tile_step = splits;  // the block's tiles
    const int tiles = first_tile < tile_end ? (tile_end - first_tile + tile_step - 1) / tile_step : 0;
    if (splits > 1 && first_tile >= tile_end) {  // the split has no key
        if ((int)threadIdx.x < block_rows) split_max[part_of(threadIdx.x)] = -INF;
        return;
    }
    const int full_tile_begin = (range.full_begin + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_end = range.full_end / BLOCK_KV;
    unsigned long long* const k_full = (unsigned long long*)(smem + BARRIERS_SMEM);
    const Block of_roles = {
        &k_map,
        Q,
        O,
        split_O,
        split_max,
        split_sum,
        q_stride_b, q_stride_h, q_stride_s, o_stride_b, o_stride_h, o_stride_s,
        lse,
        lse_stride_b, lse_stride_h, lse_stride_s,
        q_len, kv_len, splits,
        Q + b_idx * q_stride_b + first_head * q_stride_h,
        first_row,
        block_rows, group_size, first_head, b_idx,
        first_tile, tile_step, tiles, full_tile_begin, full_tile_end,
        {smem + Q_SMEM},
        {{smem + K_SMEM}, k_full, k_full + STAGES * KTile::PARTS},
        {smem + WEIGHTS_SMEM},
        (float*)(smem + MAX_SMEM), (float*)(smem + SUM_SMEM), (float*)smem,
        k_full + 2 * STAGES * KTile::PARTS,
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES * KTile::PARTS; ++i) {
            mbarrier_init(of_roles.k.full + i, 1);
            mbarrier_init(of_roles.k.empty + i, 1);
        }
        for (int i = 0; i < CONSUMERS; ++i) mbarrier_init(of_roles.handed_on + i, 4);  // warps of the consumer
        mbarrier_init_fence();
    }
    __syncthreads();  // the mbarriers are there; after this no wait is for the whole block

    // The shuffle tells the compiler that all lanes of a warp have the same value
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == CONSUMERS) {
        give_registers<PRODUCER_REGISTERS>();
        // One warp copies, a slab as soon as its place is empty
        if (threadIdx.x < 128 * CONSUMERS + 32) {
            const int lane = threadIdx.x % 32;
            const PipelineInParts<KTile> k = of_roles.k;
            HeadRows keys = {&k_map, kv_h_idx, b_idx};
            Position at;
#pragma unroll 1
            for (int tile = first_tile; tile < tile_end; tile += tile_step) {
                if (lane == 0) {
#pragma unroll 1
                    for (int slab = 0; slab < QK_SLABS; ++slab) {
                        k.acquire(at, slab);
                        unsigned long long* const its_full = k.full + slab * STAGES + at.index;
                        mbarrier_expect_bytes(its_full, KTile::Slab::BYTES);
                        keys.load_async(k.tile(at.index).smem + KTile::place(slab), its_full, 64 * slab, tile * BLOCK_KV, L2_EVICT_FIRST);
                    }
                }
                at.advance(STAGES);
            }
        }
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    if (warpgroup == 0) of_roles.compute<0>();
    else of_roles.compute<1>();
    named_barrier_sync(BOTH, WRITERS);  // the sums of both are there
    const float *O_smem = of_roles.O_smem, *max_smem = of_roles.max_smem, *sum_smem = of_roles.sum_smem;
    for (int i = threadIdx.x; i < block_rows * QUADS; i += WRITERS) {
        const int row = i / QUADS, column = i % QUADS * 4;
        Quad sum = *(const Quad*)(O_smem + row * O_STRIDE + column);
        float row_max = max_smem[row], row_sum = sum_smem[row] + sum_smem[BLOCK_Q + row];
        const int q_idx = (first_row + row) / group_size, h_idx = first_head + (first_row + row) % group_size;
        if (splits > 1) {
            const long long part = part_of(row);
            // NaN tells the join of a row with NaN, whose maximum may be that of no key
            if (column == 0) split_max[part] = row_sum == row_sum ? row_max : row_sum;
            if (row_sum == 0.0f) continue;  // no key: the join reads the maximum alone
            if (column == 0) split_sum[part] = row_sum;
            *(Quad*)(split_O + part * HEAD_DIM_V + column) = sum;
            continue;
        }
        // There is one split: its results are those of all keys
        const float divisor = row_sum == 0.0f ? 1.0f : row_sum;  // a row with no key gives 0
        for (int e = 0; e < 4; ++e) sum.at[e] /= divisor;
        bf16* o_row = O + b_idx * o_stride_b + h_idx * o_stride_h + q_idx * o_stride_s;
        ((unsigned*)(o_row + column))[0] = pack(sum.at[0], sum.at[1]);
        ((unsigned*)(o_row + column))[1] = pack(sum.at[2], sum.at[3]);
        if (column == 0)
            lse[b_idx * lse_stride_b + h_idx * lse_stride_h + q_idx * lse_stride_s] =
                row_max * softmax_scale + logf(row_sum);
    }
}

// 7. The join of all splits
//
//     m = max over splits i of m_i,  O = sum of exp(m_i - m) O_i / sum of exp(m_i - m) l_i
//
// A block computes a row: thread i has columns 4 * (i % QUADS) to + 3 of every GROUPS-th split.

extern "C" __global__ void __launch_bounds__(JOINING)
latent_decode_join(
    const float* __restrict__ split_O,  // [batch, 128, q_len, splits, 512]
    const float* __restrict__ split_max,  // [batch, 128, q_len, splits]
    const float* __restrict__ split_sum,  // [batch, 128, q_len, splits]
    bf16* O,  // [batch, 128, q_len, 512]
    long long o_stride_b, long long o_stride_h, long long o_stride_s,
    float* lse,  // [batch, 128, q_len]
    long long lse_stride_b, long long lse_stride_h, long long lse_stride_s,
    int q_len,
    int splits)  // blocks over which the keys of a tile of rows are split
{
    wait_for_kernels_before();  // the sums of all splits are there
    let_next_kernel_start();
    constexpr int GROUPS = JOINING / QUADS;
    __shared__ __align__(16) float O_smem[GROUPS * HEAD_DIM_V];
    __shared__ float sum_smem[GROUPS];
    const int q_idx = blockIdx.x % q_len, h_idx = blockIdx.x / q_len % q_heads;
    const int b_idx = blockIdx.x / q_len / q_heads;
    const long long first_part = (long long)blockIdx.x * splits;
    const int group = threadIdx.x / QUADS, column = threadIdx.x % QUADS * 4;

    float row_max = -INF, row_sum = 0.0f;
    for (int i = threadIdx.x % 32; i < splits; i += 32) row_max = fmaxf(row_max, split_max[first_part + i]);
    row_max = lane_reduce<32>(row_max, [](float a, float b) { return fmaxf(a, b); });
    const float shift = row_max == -INF ? 0.0f : row_max;  // no key
    Quad sum = {};
    if (group < GROUPS) {
#pragma unroll 4
        for (int i = group; i < splits; i += GROUPS) {
            const float weight = fast_exp2((split_max[first_part + i] - shift) * EXPONENT_SCALE);
            if (weight == 0.0f) continue;  // a split that has no key has written no sums
            row_sum += weight * split_sum[first_part + i];
            const Quad of_split = *(const Quad*)(split_O + (first_part + i) * HEAD_DIM_V + column);
            for (int e = 0; e < 4; ++e) sum.at[e] += weight * of_split.at[e];
        }
        *(Quad*)(O_smem + group * HEAD_DIM_V + column) = sum;
        if (column == 0) sum_smem[group] = row_sum;
    }
    __syncthreads();  // the sums of all groups are there
    if (group == 0) {
        row_sum = 0.0f;
        for (int g = 0; g < GROUPS; ++g) row_sum += sum_smem[g];
        for (int g = 1; g < GROUPS; ++g) {
            const Quad of_group = *(const Quad*)(O_smem + g * HEAD_DIM_V + column);
            for (int e = 0; e < 4; ++e) sum.at[e] += of_group.at[e];
        }
        const float divisor = row_sum == 0.0f ? 1.0f : row_sum;  // a row with no key gives 0
        for (int e = 0; e < 4; ++e) sum.at[e] /= divisor;
        bf16* o_row = O + b_idx * o_stride_b + h_idx * o_stride_h + q_idx * o_stride_s;
        ((unsigned*)(o_row + column))[0] = pack(sum.at[0], sum.at[1]);
        ((unsigned*)(o_row + column))[1] = pack(sum.at[2], sum.at[3]);
        if (column == 0)
            lse[b_idx * lse_stride_b + h_idx * lse_stride_h + q_idx * lse_stride_s] =
                row_max * softmax_scale + logf(row_sum);
    }
}
