// wide_heads, hopper
// ==================
//
//     attention wide_heads {
//         dtype     bf16
//         head_dim  512
//         heads     8 over 4
//         scale     0.04419417382415922
//         mask      q >= k
//     }
//
// For batch b, query head h and query row q, with the key/value head h / group_size:
//
//     s    = 0.04419417382415922 * sum over d of Q[q, d] * K[k, d]
//     S[k] = s where q >= k, else -inf
//     P[k] = exp(S[k]) / (sum over k of exp(S[k]))
//     O[d] = sum over k of P[k] * V[k, d]
//
// Shapes
//     Q    bf16 [batch, 8, q_len, 512]
//     K    bf16 [batch, 4, kv_len, 512]
//     V    bf16 [batch, 4, kv_len, 512]
//     O    bf16 [batch, 8, q_len, 512], written
//     next_work int32 [1], counter
//
// Plan, for sm_90a (Hopper: H100, H200)
//     schedule = hopper_wide: its heads have at most 256 elements: two warpgroups have half of the columns of O each
//     schedule = hopper: bf16 on tensor cores by wgmma, tiles copied by TMA, which sm_90a has
//     warpgroups = 1 + 2: one copies; O of 64 rows is too wide for the registers of one: two have half of its
//         columns each, and the first of them computes the weights for both
//     BLOCK_Q x BLOCK_KV = 64 x 64: the first preferred tile whose half of O, S and P fit a consumer's registers,
//         and which fits shared memory beside Q
//     stages = 1: later tiles are copied in parts while one is used
//     registers = 88, 240 and 176 a thread: of the producer, the first and the second consumer, which has half of O
//         alone: half of O, S and P take about 206
//     Q = in shared memory: its fragments take 128 registers a thread
//     row sums = by threads: of the weights, the heaviest of each lane as P rounds it: this rounding then moves O
//         less
//     first copy of V = after Q: Q and the first keys are needed first
//     O in shared memory = 1 of 4 slabs a warp: of 64 columns; TMA copies them to global memory in the background
//     parts of tiles = K in 4, by columns; V in 2, by keys, for each consumer: each is copied as soon as the
//         products have read its place: there is no room for a second tile
//     blocks = one for each SM: a persistent kernel: each block takes work tiles from a counter, those with the most
//         keys first
//     swizzle = 128 bytes: Q, K and V in slabs of 64 columns, 128 bytes a row, their chunks of 16 bytes permuted, so
//         that neither TMA nor wgmma meets a bank conflict
//     heads numbered together = by length: as many key/value heads as fit 32 MiB of L2, 8 to 64
//
// Shared memory of a block, 230296 bytes
//          0  Q        bf16 [8][64][64], the query rows
//      65536  K        bf16 [1][4][2][64][64], the keys of 1 tile, in parts of their columns
//     131072  V        bf16 [1][2][8][32][64], the values of 1 tile, in parts of their keys, for each consumer
//     196608  WEIGHTS  bf16 [2][1][64][64], P, for the second consumer
//     212992  O        bf16 [8][1][16][64], output rows of each warp, on their way to global memory
//     229376  NOTICES  float [2][68], what the second consumer does with O before
//     230016  BARRIERS mbarrier [24], see the kernel
//     230272  WORK_TILES int [2][3], which rows and head are current, and were before
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. Which tiles are visited
//     4. Loading tiles
//     5. Work tiles
//     6. The kernel: one warpgroup copies, one computes weights, and both of the others multiply

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 512;
constexpr int q_heads = 8;
constexpr int kv_heads = 4;
constexpr float softmax_scale = 0.04419417382415922f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float EXPONENT_SCALE = softmax_scale * LOG2_E;  // exp(softmax_scale x) = 2^(EXPONENT_SCALE x)
constexpr int BLOCK_Q = 64;  // query rows of a block
constexpr int BLOCK_KV = 64;  // keys of a tile
constexpr int THREADS = 384;
constexpr int Q_SMEM = 0;
constexpr int K_SMEM = 65536;
constexpr int V_SMEM = 131072;
constexpr int WEIGHTS_SMEM = 196608;
constexpr int O_SMEM = 212992;
constexpr int NOTICES_SMEM = 229376;
constexpr int BARRIERS_SMEM = 230016;
constexpr int WORK_TILES_SMEM = 230272;
constexpr float RESCALE_THRESHOLD = 8.0f;  // an exponent may exceed that of the maximum in use by this much: a factor of 2^8
constexpr float LARGE = 65536.0f;  // above this magnitude, fp32 rounds maximum * EXPONENT_SCALE too coarsely
constexpr int MAX_CHAINS = 4;  // independent maxima of a row, so that comparisons do not wait for each other
constexpr int STAGES = 1;  // tiles of K, and of V, in shared memory
constexpr int CONSUMERS = 2;  // warpgroups that multiply, for the same 64 rows
constexpr int WARPGROUP_ROWS = 64;
constexpr int RELEASES = 1;  // arrivals that empty a part of a stage: one of its consumer
constexpr int PRODUCER_REGISTERS = 88;  // of a thread
constexpr int CONSUMER_REGISTERS = 240;
constexpr int ROWS = 2;  // of a thread
constexpr int ROW_BYTES = 128;  // a row of a slab: 64 columns of a tile
constexpr int QK_SLABS = 8;
constexpr int V_SLABS = 8;
constexpr int OUTPUT_SLABS = 1;  // of a warp's rows on their way to global memory
constexpr int K_STEPS = HEAD_DIM / 16;  // steps of 16 over the head size
constexpr int VALUE_SLABS = 8;  // of V and O, of both consumers
constexpr int OUTPUT_COLUMNS = 64 * (VALUE_SLABS / 2);  // columns of O in registers of the first consumer
constexpr int FOLLOWER_COLUMNS = 64 * VALUE_SLABS - OUTPUT_COLUMNS;  // and of the second
constexpr int K_PARTS = 4;  // parts of a tile of K, by columns
constexpr int V_PARTS = 2;  // parts of a tile of V, by keys, each in two halves of its columns
constexpr int FOLLOWER_REGISTERS = 176;  // of a thread of the second consumer
constexpr int KEY_ARRIVALS = 1;  // lanes that fill the first part of a tile of K
constexpr int VISIT_READERS = 0;  // threads of the producer that read which tile is next
constexpr int WEIGHT_STAGES = 2;  // tiles of weights on their way to the second consumer

// 2. Primitives

// Two neighbouring elements of a fragment in one register, `low` in the lower half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// The two elements that pack() joined, as fp32.
__device__ __forceinline__ float low_of(unsigned packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_of(unsigned packed) { return __uint_as_float(packed & 0xffff0000u); }

// 2^x on the special function unit; a denormal counts as 0. Relative error at most 2^-22 (PTX ISA, ex2.approx).
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x on the special function unit: within 1 in the last place (PTX ISA, rcp.approx); x must not be denormal.
__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

// 3. Which tiles are visited
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

// The tiles to visit, from the last to the first: [begin, end). Those in [full_begin, full_end) are full.
struct TileRange {
    int begin, end, full_begin, full_end;
};

// 4. Loading tiles

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
using KTile = TileInParts<BLOCK_KV, QK_SLABS, 1, K_PARTS>;
using VTile = TileInParts<BLOCK_KV, VALUE_SLABS, V_PARTS, 2>;
using WeightTile = SlabTile<BLOCK_Q, (BLOCK_KV + 63) / 64>;
using OTile = SlabTile<16, OUTPUT_SLABS>;  // output rows of a warp

// 5. Work tiles

// A work tile: a block of rows of one head. Heads are divided into sections of heads_in_l2, and work tiles are numbered section
// by section: blocks that run at the same time have neighbouring rows of a few heads, and read the same keys and values from
// L2. In a section the last rows come first: under a causal mask they have the most keys.
struct WorkTile {
    int q_block, h_idx, b_idx;
};
__device__ __forceinline__ WorkTile work_tile_of(int block, int blocks, int q_heads, int q_len, int heads_in_l2) {
    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    const int first_head = block / (heads_in_l2 * q_blocks) * heads_in_l2;  // the first head of the section
    const int heads = min(heads_in_l2, blocks / q_blocks - first_head);  // heads of the section: the last one may have fewer
    const int in_section = block - first_head * q_blocks;
    const int blocks_after = in_section / heads;  // blocks of the head with later rows
    const int head = first_head + in_section % heads;
    return {q_blocks - 1 - blocks_after, head % q_heads, head / q_heads};
}
constexpr int END = -1;  // as a q_block: there is no more work

// The work tiles that the producer publishes, in shared memory. There are two places, used in turn: a work tile's place is the
// parity of its phase, and the other one still has the previous work tile.
struct TileFeed {
    WorkTile works[2];

    __device__ __forceinline__ void write(const Position& at, const WorkTile& work) volatile {
        works[at.phase].q_block = work.q_block, works[at.phase].h_idx = work.h_idx, works[at.phase].b_idx = work.b_idx;
    }
};

// 6. The kernel: one warpgroup copies, one computes weights, and both of the others multiply
//
//     S[q, k] = s  where q >= k, else -inf
//     with s = softmax_scale * sum over d of Q[q, d] * K[k, d]
//
//     m = -inf, l = 0, O = 0; for every tile of keys:
//         S  = score(Q K^T)                     -inf where the mask forbids
//         m' = max(m, row maximum of S)
//         P  = exp(S - m')
//         l  = l * exp(m - m') + row sum of P
//         O  = O * exp(m - m') + P V
//         m  = m'
//     O = O / l
//
// There is one block for each SM. A work tile is 64 rows of a head. A block takes the next work tile that no block has taken;
// those with the most keys come first. Warpgroup 0, the producer, copies. O of a work tile is too wide for the registers of one
// warpgroup: 64 rows of 512 columns would be 256 registers a thread. So the
// two others, the consumers, have half of the columns each. The first computes scores and the softmax, and hands each tile of
// weights to the second through shared memory. While its threads compute the softmax of the next tile, the tensor cores multiply V of
// this one for both:
//
//     producer           K0  K1  K2 ...                                         each part as soon as its place is empty
//                        V0  V1  V2 ...
//     first consumer     Q K0 | Q K1, P0 V0 | Q K2, P1 V1 | ... | Pn Vn         products
//                             P0 |          P1 |          P2 ...                weights
//     second consumer            P0 V0        | P1 V1       | ... | Pn Vn       the other columns of V
//
//
// Fragments of S and O: of the 16 rows of a product, lane l holds rows l / 4 and l / 4 + 8; of every 8 columns, columns
// 2 * (l % 4) and the next. The four lanes with the same l / 4 share a row.
// For register i of S or O: the lane's row, 0 (the upper) or 1 (the lower); and the column, in a lane with lane % 4 == 0.
__device__ constexpr int row_in_pair(int i) { return i / 2 % 2; }
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

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

// What the first consumer tells the second with the weights of a tile, or after the last tile.
struct Notice {
    int what[4];               // what the rows of each warp need
    float factor[BLOCK_Q];     // each row's: O is multiplied by it
};
enum : int { KEEP, RESCALE, FINISH };  // O stays; is multiplied before the weights; there are no more weights, and it is complete

// What the roles of a block share: the arguments of the call, and shared memory with the mbarriers that guard it.
struct Block {
    const TensorMap *q_map, *k_map, *v_map, *o_map;
    unsigned* next_work;
    int batch, q_len, kv_len, heads_in_l2;

    Pipeline<QTile> q;
    PipelineInParts<KTile> k;
    Position k_at;  // where this role is in `k`, and below in the others
    PipelineInParts<VTile> v;  // for each part of the keys, the columns of the first consumer and those of the second
    Position v_at;
    Pipeline<WeightTile> weights;  // from the first consumer to the second
    Position weights_at;
    volatile Notice* notices;  // [WEIGHT_STAGES], beside the weights
    OTile o;                   // first of [4 * CONSUMERS]: the rows of each warp on their way to global memory
    // full: when the work tile is written. empty: when each thread of the consumers has read it, and those that copy Q and V
    Pipeline<volatile TileFeed*> feed;
    Position work_at;

    __device__ __forceinline__ const volatile WorkTile& current_work() const { return feed.first->works[work_at.phase]; }
    __device__ __forceinline__ int work_tiles() const { return (q_len + BLOCK_Q - 1) / BLOCK_Q * q_heads * batch; }

    // The tiles that have keys for a block of rows
    __device__ __forceinline__ TileRange tiles_of(int q_block) const {
        const int q_lo = q_block * BLOCK_Q;
        const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
        const KvRange range = kv_range(q_lo, q_hi, kv_len);
        const int tile_begin = range.begin / BLOCK_KV;
        const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
        const int full_tile_begin = (range.full_begin + BLOCK_KV - 1) / BLOCK_KV;
        const int full_tile_end = range.full_end / BLOCK_KV;

        return {tile_begin, tile_end, full_tile_begin, full_tile_end};
    }

    // All threads, before the roles begin
    __device__ __forceinline__ void set_up() const {
        if (threadIdx.x == 0) {
            mbarrier_init(feed.full, 1);
            mbarrier_init(feed.empty, 128 * CONSUMERS + 2);  // consumer threads, and those that copy Q and V
            mbarrier_init(q.full, 1);
            mbarrier_init(q.empty, 4);  // warps of the first consumer
            for (int i = 0; i < STAGES * KTile::PARTS; ++i) {
                const bool first = i < STAGES;  // with which key vectors come, and which the thread that copies V may wait for
                mbarrier_init(k.full + i, first ? KEY_ARRIVALS : 1);
                mbarrier_init(k.empty + i, RELEASES + (first ? VISIT_READERS : 0));
            }
            for (int i = 0; i < STAGES * VTile::PARTS; ++i) {
                mbarrier_init(v.full + i, 1);
                mbarrier_init(v.empty + i, RELEASES);
            }
            for (int i = 0; i < WEIGHT_STAGES; ++i) {
                mbarrier_init(weights.full + i, 4);   // warps of the first consumer
                mbarrier_init(weights.empty + i, 4);  // and of the second
            }
            mbarrier_init_fence();
        }
        __syncthreads();  // what is written here is there; after this no wait is for the whole block
    }
};

// The producer warpgroup: loads. A few of its threads copy, as far ahead of the products as there are empty buffers.
struct Producer : Block {
    // One thread: takes work tiles until none is left; publishes each and copies its keys
    __device__ __forceinline__ void load_keys() {
        const int works = work_tiles();
        for (int next = blockIdx.x; next < works; next = next_work_tile(works)) {
            const WorkTile at = work_tile_of(next, works, q_heads, q_len, heads_in_l2);
            const int q_block = at.q_block, h_idx = at.h_idx, b_idx = at.b_idx;
            const HeadRows keys = {k_map, h_idx / (q_heads / kv_heads), b_idx};
            const TileRange tiles = tiles_of(q_block);
            publish(q_block, h_idx, b_idx);
            for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) load_key_tile(tile, keys);
            work_at.advance(1);
        }
        feed.acquire(work_at);
        feed.first->write(work_at, {END, 0, 0});
        mbarrier_arrive(feed.full);
    }

    // The next work tile by the counter, taken when all tiles of the last one have been copied
    __device__ __forceinline__ int next_work_tile(int works) const {
        return gridDim.x + atomicInc(next_work, works - 1);  // wraps to 0 after the last one
    }

    // Publishes a work tile to all roles
    __device__ __forceinline__ void publish(int q_block, int h_idx, int b_idx) {
        feed.acquire(work_at);
        feed.first->write(work_at, {q_block, h_idx, b_idx});
        mbarrier_arrive(feed.full);
    }

    // Copies the keys of a tile as soon as a stage is empty
    __device__ __forceinline__ void load_key_tile(int tile, const HeadRows& keys) {
        k.acquire(k_at);
        k.load_async(k_at, keys, tile * BLOCK_KV);
        k_at.advance(STAGES);
    }

    // One thread: copies the values of each work tile
    __device__ __forceinline__ void load_values() {
        for (;; work_at.advance(1)) {
            q.wait_full(work_at);  // Q and the first keys come before V
            const int q_block = current_work().q_block;
            if (q_block == END) break;
            const int h_idx = current_work().h_idx, b_idx = current_work().b_idx;
            feed.release(work_at);
            const HeadRows values = {v_map, h_idx / (q_heads / kv_heads), b_idx};
            const TileRange tiles = tiles_of(q_block);
            for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) load_value_tile(tile, values);
        }
    }

    __device__ __forceinline__ void load_value_tile(int tile, const HeadRows& values) {
        v.acquire(v_at);
        v.load_async(v_at, values, tile * BLOCK_KV);
        v_at.advance(STAGES);
    }

    // One thread: copies the rows of Q of each work tile, as soon as the products have read those before
    __device__ __forceinline__ void load_queries() {
        for (;; work_at.advance(1)) {
            feed.wait_full(work_at);
            const int q_block = current_work().q_block;
            if (q_block == END) break;
            const HeadRows queries = {q_map, current_work().h_idx, current_work().b_idx};
            feed.release(work_at);
            q.acquire(work_at);
            q.load_async(0, queries, q_block * BLOCK_Q, L2_EVICT_FIRST);
        }
        mbarrier_arrive(q.full);  // the thread that copies V waits for it, and is to see the end too
    }
};

// What both consumers have: half of the columns of O. Each of their threads has the members in registers.
struct Multiplier : Block {
    int consumer, thread, lane;  // numbers: of the half of the columns, of this thread in its warpgroup, and in its warp
    unsigned v_operand;  // stage 0's

    __device__ __forceinline__ Multiplier(const Block& block, int number) : Block(block), consumer(number) {
        thread = threadIdx.x % 128, lane = thread % 32;
        v_operand = v.first.mn_major();
    }

    // Issues O += P V for this consumer's columns, by parts of the keys, a group each. `multiply`: a product of 16 keys,
    // by its number and its values
    template <typename Multiply> __device__ __forceinline__ void issue_pv(const Multiply& multiply) {
        constexpr int STEPS = BLOCK_KV / 16 / V_PARTS;
#pragma unroll
        for (int part = 0; part < V_PARTS; ++part) {
            const int number = 2 * part + consumer;
            v.wait_full(v_at, number);
            const unsigned place = (v_at.index * VTile::BYTES + VTile::place(number)) / 16;
            const unsigned long long values = smem_descriptor(v_operand + place);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                multiply(part * STEPS + step, values + VTile::Slab::mn_major_step(step));
            wgmma_commit();
        }
    }

    // Waits for P V, and releases its values part by part: the producer may copy the next ones there
    template <int N> __device__ __forceinline__ void finish_pv(float (&O)[N]) {
#pragma unroll
        for (int part = 0; part < V_PARTS; ++part) {
            if (part < V_PARTS - 1) wgmma_wait<1>();
            else wgmma_wait<0>();
            if (thread == 0) v.release(v_at, 2 * part + consumer);
        }
        wgmma_received(O);
        v_at.advance(STAGES);
    }

    // O of a thread, multiplied by the factors of its rows
    template <int N> static __device__ __forceinline__ void scale_output(float (&O)[N], float upper, float lower) {
#pragma unroll
        for (int i = 0; i < N; ++i) O[i] *= row_in_pair(i) == 0 ? upper : lower;
    }

    // Starts the copy of this consumer's columns of O to global memory, from its tile in shared memory, OUTPUT_SLABS slabs at a
    // time. TMA writes no rows and columns past the end
    template <int N> __device__ __forceinline__ void store_output(const float (&O)[N], const WorkTile& at) {
        const int lane = thread_index() % 32, warp = thread_index() / 32 - 4;
        const int first_row = at.q_block * BLOCK_Q + 16 * (warp % 4);
        const OTile rows = {o.smem + warp * OTile::BYTES};
#pragma unroll
        for (int first = 0; first < N / 32; first += OUTPUT_SLABS) {
            if (lane == 0) tma_store_wait_read<0>();  // earlier copies have read the tile
            __syncwarp();
#pragma unroll
            for (int i = 32 * first; i < min(32 * (first + OUTPUT_SLABS), N); i += 8)  // 16 columns each
                stmatrix_x4(rows.at(i / 32 - first, lane % 16, i % 32 / 4 + lane / 16), pack(O[i], O[i + 1]),
                            pack(O[i + 2], O[i + 3]), pack(O[i + 4], O[i + 5]), pack(O[i + 6], O[i + 7]));
            async_proxy_fence();
            __syncwarp();
            if (lane == 0) {
                for (int i = 0; i < min(OUTPUT_SLABS, N / 32 - first); ++i) {
                    const int slab = VTile::first_slab(consumer) + first + i;
                    if (slab >= V_SLABS) break;
                    tma_store(o_map, rows.smem + i * OTile::SLAB_BYTES, 64 * slab, first_row, at.h_idx, at.b_idx);
                }
                tma_store_commit();
            }
        }
    }
};

// A thread's registers of the matrices: accumulators S and O, operand P.
struct Fragments {
    float S[BLOCK_KV / 2], O[OUTPUT_COLUMNS / 2];
    unsigned P[BLOCK_KV / 16][4];
};

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
    float shift[ROWS];    // subtracted from exponents: max * EXPONENT_SCALE, or 0
    float limit[ROWS];    // the largest score that does not change the maximum; -INF: every tile changes it
    int largest[ROWS];    // this lane's largest score of the tile, as bits
    float sum[ROWS];      // this thread's weights; after the last tile, the row's

    // The row, 0 to ROWS - 1, of register i of N: a pair of rows has 2 * N / ROWS of them, two in turn for each
    template <int N> static __device__ constexpr int row_of(int i) { return i / (2 * N / ROWS) * 2 + i / 2 % 2; }

    // Row r before its first tile
    __device__ __forceinline__ void begin(int r) {
        max[r] = -INF;
        sum[r] = 0.0f;
        limit[r] = -INF;
    }

    // Whether a maximum is so large that it is subtracted from the scores before they are scaled, which is exact
    static __device__ __forceinline__ bool is_large(float maximum) { return fabsf(maximum * EXPONENT_SCALE) > LARGE; }

    // Finds the largest score that this lane has of each row, by comparing bits as integers. Floats that are not negative have
    // the same order as their bits; if all scores of a row are negative, the result is only known to be negative
    template <int N> __device__ __forceinline__ void find_largest(const float (&S)[N]) {
        int chains[ROWS][MAX_CHAINS];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int own = i % (2 * N / ROWS);  // among the registers of two rows, four for every 8 columns
            const bool begins = own < 4 * MAX_CHAINS && i % 2 == 0;
            int& chain = chains[row_of<N>(i)][own / 4 % MAX_CHAINS];
            chain = begins ? __float_as_int(S[i]) : ::max(chain, __float_as_int(S[i]));
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            largest[r] = chains[r][0];
#pragma unroll
            for (int chain = 1; chain < MAX_CHAINS; ++chain) largest[r] = ::max(largest[r], chains[r][chain]);
        }
    }

    // Raises the maxima if a score of the tile exceeds its limit. Returns whether it did: the caller then multiplies O by alpha
    // FIRST: the tile is the first of its rows. PARTIAL: the mask may forbid pairs of the tile
    template <bool PARTIAL, bool FIRST, int N> __device__ __forceinline__ bool raise_maxima(float (&S)[N]) {
        bool exceeds = false;  // a negative limit always counts: its bits are in no order with others
#pragma unroll
        for (int r = 0; r < ROWS; ++r) exceeds |= largest[r] > __float_as_int(limit[r]) || limit[r] < 0.0f;
        const bool rescale = FIRST || __any_sync(0xffffffff, exceeds);
        if (rescale) raise<PARTIAL, FIRST>(S);
        return rescale;
    }

    // Raises the maximum of each row to the largest of its scores so far, over the lanes that share the row
    template <bool PARTIAL, bool FIRST, int N> __device__ __forceinline__ void raise(float (&S)[N]) {
        float highest[ROWS];  // the largest that this lane knows
#pragma unroll
        for (int r = 0; r < ROWS; ++r) highest[r] = max[r];
        // If a row has negative scores only, `largest` is not its largest one: compare the floats
        // In a first tile that the mask cuts such rows are common, with scores of -inf: there the floats are compared without a vote
        int least = largest[0];
#pragma unroll
        for (int r = 1; r < ROWS; ++r) least = ::min(least, largest[r]);
        if ((FIRST && PARTIAL) || __any_sync(0xffffffff, least < 0)) {
#pragma unroll
            for (int i = 0; i < N; ++i) highest[row_of<N>(i)] = fmaxf(highest[row_of<N>(i)], S[i]);
        } else {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) highest[r] = fmaxf(highest[r], __int_as_float(largest[r]));
        }
        float offset[ROWS];  // subtracted from the scores
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float subtracted = raise_max(max[r], alpha[r], quad_max(highest[r]));
            const bool large = is_large(subtracted);
            offset[r] = large ? subtracted : 0.0f;
            shift[r] = large ? 0.0f : subtracted * EXPONENT_SCALE;
            limit[r] = large ? -INF : max[r] + RESCALE_THRESHOLD / EXPONENT_SCALE;
            sum[r] *= alpha[r];
        }
        // A row with a large maximum comes here in each tile, because its limit is -INF
        bool any = false;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) any |= offset[r] != 0.0f;
        if (__any_sync(0xffffffff, any)) {
#pragma unroll
            for (int i = 0; i < N; ++i) S[i] -= offset[row_of<N>(i)];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) largest[r] = __float_as_int(__int_as_float(largest[r]) - offset[r]);
        }
    }

    // Replaces the scores of a tile by its weights
    template <int N> __device__ __forceinline__ void compute_weights(float (&S)[N]) {
        float sums[ROWS][2] = {};  // two chains of additions for each row, so that additions wait less for each other
#pragma unroll
        for (int i = 0; i < N; ++i) {
            S[i] = fast_exp2(S[i] * EXPONENT_SCALE - shift[row_of<N>(i)]);
            sums[row_of<N>(i)][i % 2] += S[i];
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] += sums[r][0] + sums[r][1];
        // A lane's largest weight is added as P will have it, rounded: the rounding then changes sum and product alike
        float heaviest[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) heaviest[r] = fast_exp2(__int_as_float(largest[r]) * EXPONENT_SCALE - shift[r]);
        const unsigned rounded = pack(heaviest[0], heaviest[1]);
        sum[0] += low_of(rounded) - heaviest[0];
        sum[1] += high_of(rounded) - heaviest[1];
    }
};

// The first consumer: computes scores and weights, and multiplies them with its own columns of V.
struct Scorer : Multiplier {
    int lane_row;  // this lane's first row in the block; its second is 8 further
    unsigned q_operand, k_operand;  // stage 0's

    Fragments& frag;
    RowSoftmax& softmax;

    // The current work tile
    int q_block, q_lo, tile;
    bool any;  // whether it has a tile to visit
    TileRange tiles;

    __device__ __forceinline__ Scorer(const Block& block, Fragments& frag, RowSoftmax& softmax)
        : Multiplier(block, 0), frag(frag), softmax(softmax) {
        lane_row = WARPGROUP_ROWS * consumer + 16 * (thread / 32) + lane / 4;
        q_operand = q.first.k_major(), k_operand = k.first.k_major();
        work_at.phase = 1;  // the first next_work_tile() makes it 0
    }

    // Releases a part of K. All lanes are done with the tile before: they met when its weights were handed over
    __device__ __forceinline__ void release_keys(int part) {
        if (thread == 0) k.release(k_at, part);
    }

    // Issues S = Q K^T by parts of the columns, each as soon as it is there, and releases all but the last
    __device__ __forceinline__ void issue_qk() {
        constexpr int STEPS = 4 * KTile::slabs(0);
        k.wait_full(k_at);
#pragma unroll
        for (int part = 0; part < KTile::PARTS; ++part) {
            if (part > 0) k.wait_full(k_at, part);
            // Operands as if they were not known before: kept from tile to tile, those of so many steps would take registers
            const unsigned queries = opaque(q_operand);
            const unsigned keys = opaque(k_operand) + (k_at.index * KTile::BYTES + KTile::place(part)) / 16;
            wgmma_fence();
#pragma unroll
            for (int step = part * STEPS; step < min((part + 1) * STEPS, K_STEPS); ++step)
                wgmma_qk(frag.S, smem_descriptor(queries + QTile::k_major_step(step)),
                         smem_descriptor(keys + KTile::Slab::k_major_step(step % STEPS)), step > 0);
            wgmma_commit();
            if (part > 0) {
                wgmma_wait<1>();
                release_keys(part - 1);
            }
        }
    }

    // When S is there
    __device__ __forceinline__ void finish_qk() {
        wgmma_received(frag.S);
        release_keys(KTile::PARTS - 1);
        k_at.advance(STAGES);
    }

    __device__ __forceinline__ void issue_own_pv() {
        issue_pv([&](int step, unsigned long long values) { wgmma_pv(frag.O, frag.P[step], values, true); });
    }

    // S = -inf where the mask forbids. A full tile (PARTIAL is false) has no such pair
    template <bool PARTIAL> __device__ __forceinline__ void score_tile() {
        const int kv_lo = tile * BLOCK_KV;
        if constexpr (PARTIAL) mask_tile(kv_lo, -INF);
    }

    // S = value where the mask forbids
    __device__ __forceinline__ void mask_tile(int kv_lo, float value) {
        // each row has one range of keys: [kv_begin, kv_end), counted from the lane's first key
        const int first_key = kv_lo + lane % 4 * 2;
        int kv_end[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int q_idx = q_lo + lane_row + 8 * r;
            const KvRange allowed = kv_range(q_idx, q_idx, kv_len);
            kv_end[r] = allowed.end - first_key;
        }
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; ++i) {
            const int r = row_in_pair(i), key = column_of(i);
            if (key >= kv_end[r]) frag.S[i] = value;
        }
    }

    // One step of the online softmax: replaces the scores of a tile by its weights. Returns whether O must be multiplied by
    // alpha. FIRST: the tile is the first of its rows.
    template <bool PARTIAL, bool FIRST> __device__ __forceinline__ bool softmax_tile() {
        softmax.find_largest(frag.S);
        const bool rescale = softmax.raise_maxima<PARTIAL, FIRST>(frag.S);
        softmax.compute_weights(frag.S);
        return rescale;
    }

    // P as the A operand of P V: the fragments of S, rounded
    __device__ __forceinline__ void round_weights() {
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 4; ++i) frag.P[i / 4][i % 4] = pack(frag.S[2 * i], frag.S[2 * i + 1]);
    }

    // Hands the weights P to the second consumer; `what` is to be done with O before, by the factors of this thread's rows
    __device__ __forceinline__ void hand_over(int what, float upper, float lower) {
        const int warp = thread / 32;
        weights.acquire(weights_at);
        const WeightTile out = weights.tile(weights_at.index);
        volatile Notice& notice = notices[weights_at.index];
#pragma unroll
        for (int step = 0; what != FINISH && step < BLOCK_KV / 16; ++step)
            stmatrix_x4(out.at(step / 4, 16 * warp + lane % 16, step % 4 * 2 + lane / 16), frag.P[step][0], frag.P[step][1],
                        frag.P[step][2], frag.P[step][3]);
        if (lane == 0) notice.what[warp] = what;
        if (what != KEEP && lane % 4 == 0) {
            const int row = 16 * warp + lane / 4;
            notice.factor[row] = upper, notice.factor[row + 8] = lower;
        }
        async_proxy_fence();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(weights.full + weights_at.index);
        weights_at.advance(WEIGHT_STAGES);
    }

    // Moves to the next tile: its Q K^T overlaps with P V of this tile; then its weights are computed
    template <bool PARTIAL> __device__ __forceinline__ void step() {
        issue_qk();
        issue_own_pv();
        wgmma_wait<V_PARTS>();
        finish_qk();
        score_tile<PARTIAL>();
        const bool rescale = softmax_tile<PARTIAL, false>();
        finish_pv(frag.O);
        if (rescale) scale_output(frag.O, softmax.alpha[0], softmax.alpha[1]);
        round_weights();
        hand_over(rescale ? RESCALE : KEEP, softmax.alpha[0], softmax.alpha[1]);
    }

    // Sets up each row before its first tile
    __device__ __forceinline__ void begin_rows() {
        clear_output();
        for (int r = 0; r < 2; ++r) {
            softmax.begin(r);
        }
    }

    // The weights of the first tile. O has no product yet that would have to be multiplied by alpha
    __device__ __forceinline__ void first_weights() {
        const bool partial = tile < tiles.full_begin || tile >= tiles.full_end;
        if (partial) {
            score_tile<true>();
            softmax_tile<true, true>();
        } else {
            score_tile<false>();
            softmax_tile<false, true>();
        }
        round_weights();
    }

    __device__ __forceinline__ void clear_output() {
#pragma unroll
        for (int i = 0; i < OUTPUT_COLUMNS / 2; ++i) frag.O[i] = 0.0f;
    }

    // Moves to the next work tile: its coordinates, its first tile
    __device__ __forceinline__ void next_work_tile() {
        work_at.advance(1);
        feed.wait_full(work_at);
        q_block = current_work().q_block;
        any = false;
        if (q_block == END) return;
        q_lo = q_block * BLOCK_Q;
        tiles = tiles_of(q_block);
        tile = tiles.end - 1;
        any = tile >= tiles.begin;
    }

    // Finishes a work tile, and tells the second consumer by what its columns are multiplied
    __device__ __forceinline__ void epilogue() {
        const WorkTile at = {q_block, current_work().h_idx, current_work().b_idx};
        float inverse_sum[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(softmax.sum[r]);
            inverse_sum[r] = sum == 0.0f ? 0.0f : fast_reciprocal(sum);  // a row with no key gives 0
        }
        hand_over(FINISH, inverse_sum[0], inverse_sum[1]);
        scale_output(frag.O, inverse_sum[0], inverse_sum[1]);
        store_output(frag.O, at);
    }

    // Every work tile, tile by tile
    __device__ __forceinline__ void compute() {
        next_work_tile();
        while (q_block != END) {
            begin_rows();
            if (!any) {
                if (lane == 0) q.wait_full(work_at);  // as it releases Q: another lane might wait until the next but one is there
                feed.release(work_at);
                if (lane == 0) q.release(work_at);  // every Q K^T is done: the next rows may be copied
                epilogue();
                next_work_tile();
                continue;
            }
            q.wait_full(work_at);
            issue_qk();
            wgmma_wait<0>();
            feed.release(work_at);  // each lane has read the work tile, and waited for Q: after the last one its mbarrier goes on
            finish_qk();
            first_weights();
            hand_over(KEEP, 1.0f, 1.0f);
            --tile;
#pragma unroll 1
            for (; tile >= max(tiles.full_end, tiles.begin); --tile) step<true>();
#pragma unroll 1
            for (; tile >= tiles.begin; --tile) step<false>();
            if (lane == 0) q.release(work_at);  // every Q K^T is done: the next rows may be copied
            issue_own_pv();
            finish_pv(frag.O);
            epilogue();
            next_work_tile();
        }
        if (lane == 0) tma_store_wait<0>();  // the copies read shared memory, which the block frees when it ends
    }
};

// The second consumer: multiplies the weights of the first with its own columns of V.
struct Follower : Multiplier {
    float (&O)[FOLLOWER_COLUMNS / 2];

    __device__ __forceinline__ Follower(const Block& block, float (&O)[FOLLOWER_COLUMNS / 2]) : Multiplier(block, 1), O(O) {}

    // Waits for the next weights and multiplies O by the factors of its rows; false: it is complete
    __device__ __forceinline__ bool take_notice() {
        weights.wait_full(weights_at);
        const volatile Notice& notice = notices[weights_at.index];
        const int what = notice.what[thread / 32];
        const int row = 16 * (thread / 32) + lane / 4;
        if (what != KEEP) scale_output(O, notice.factor[row], notice.factor[row + 8]);
        return what != FINISH;
    }

    __device__ __forceinline__ void release_weights() {
        __syncwarp();  // all lanes have read the notice
        if (lane == 0) weights.release(weights_at);
        weights_at.advance(WEIGHT_STAGES);
    }

    // Every work tile
    __device__ __forceinline__ void compute() {
        for (;; work_at.advance(1)) {
            feed.wait_full(work_at);
            const WorkTile at = {current_work().q_block, current_work().h_idx, current_work().b_idx};
            if (at.q_block == END) break;
            feed.release(work_at);
#pragma unroll
            for (int i = 0; i < FOLLOWER_COLUMNS / 2; ++i) O[i] = 0.0f;
#pragma unroll 1
            while (take_notice()) {
                const unsigned long long tile = smem_descriptor(weights.tile(weights_at.index).k_major());
                issue_pv([&](int step, unsigned long long values) {
                    wgmma_pv_shared(O, tile + WeightTile::k_major_step(step), values, true);
                });
                finish_pv(O);
                release_weights();
            }
            release_weights();
            store_output(O, at);
        }
        if (lane == 0) tma_store_wait<0>();  // the copies read shared memory, which the block frees when it ends
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
wide_heads_hopper(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap o_map,
    unsigned* next_work,  // [1]
    int batch, int q_len, int kv_len,
    int heads_in_l2)  // query heads whose blocks are numbered together
{
    extern __shared__ __align__(1024) unsigned char smem[];

    unsigned long long* const work_full = (unsigned long long*)(smem + BARRIERS_SMEM);
    unsigned long long *const q_full = work_full + 2, *const k_full = q_full + 2;
    unsigned long long* const v_full = k_full + 2 * STAGES * KTile::PARTS;
    unsigned long long* const weights_full = v_full + 2 * STAGES * VTile::PARTS;
    const Block block = {
        &q_map, &k_map, &v_map, &o_map,
        next_work,
        batch, q_len, kv_len, heads_in_l2,
        {{{smem + Q_SMEM}, q_full}, q_full + 1},
        {{smem + K_SMEM}, k_full, k_full + STAGES * KTile::PARTS}, {},
        {{smem + V_SMEM}, v_full, v_full + STAGES * VTile::PARTS}, {},
        {{{smem + WEIGHTS_SMEM}, weights_full}, weights_full + WEIGHT_STAGES}, {},
        (volatile Notice*)(smem + NOTICES_SMEM),
        {smem + O_SMEM},
        {{(volatile TileFeed*)(smem + WORK_TILES_SMEM), work_full}, work_full + 1}, {},
    };
    block.set_up();

    // The shuffle tells the compiler that all lanes of a warp have the same value, which it cannot see of threadIdx.x / 128. It
    // then branches once for all lanes, and keeps values that depend on the warpgroup in uniform registers
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        give_registers<PRODUCER_REGISTERS>();
        Producer producer = {block};
        if (threadIdx.x == 0) producer.load_keys();
        if (threadIdx.x == 32) producer.load_values();
        if (threadIdx.x == 64) producer.load_queries();
    } else if (warpgroup == 1) {
        take_registers<CONSUMER_REGISTERS>();
        // Not members of Scorer: the compiler keeps an object with arrays in registers only if loops over these are unrolled
        Fragments frag;
        RowSoftmax softmax;
        Scorer scorer(block, frag, softmax);
        scorer.compute();
    } else {
        take_registers<FOLLOWER_REGISTERS>();
        float O[FOLLOWER_COLUMNS / 2];
        Follower follower(block, O);
        follower.compute();
    }
}
