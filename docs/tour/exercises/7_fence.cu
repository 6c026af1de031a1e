// gpt2, hopper
// ============
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
//     O[d] = sum over k of P[k] * V[k, d]
//
// Shapes
//     Q    fp16 [batch, q_heads, q_len, 64]
//     K    fp16 [batch, kv_heads, kv_len, 64]
//     V    fp16 [batch, kv_heads, kv_len, 64]
//     O    fp16 [batch, q_heads, q_len, 64], written
//     next_work int32 [1], counter
//
// Plan, for sm_90a (Hopper: H100, H200)
//     schedule = hopper: fp16 on tensor cores by wgmma, tiles copied by TMA, which sm_90a has
//     warpgroups = 1 + 2: one copies; 2 compute 64 rows each, the weights of one beside the products of another
//     BLOCK_Q x BLOCK_KV = 128 x 128: the first preferred tile whose O, S and P fit a consumer's registers, and
//         whose stages fit shared memory
//     stages = 3: the copies of later tiles are under way while these are used
//     registers = 40 and 232 a thread: copying needs few; about 158 hold O, S and P
//     Q = in registers: its fragments take 16 registers a thread; its buffer is free for the next
//     row sums = by P V: columns of ones beside V: no addition for each weight, and each weight counts as rounded in
//         P
//     O in shared memory = 1 of 1 slabs a warp: copied out in the background
//     blocks = one for each SM: a persistent kernel: each block takes rows from a counter, the longest first, and
//         copies ahead for the next
//     swizzle = 128 bytes: Q, K and V in slabs of 64 columns, 128 bytes a row, their chunks of 16 bytes permuted, so
//         that neither TMA nor wgmma meets a bank conflict
//     other tiles = 256 x 64, 192 x 128: used instead for calls whose lengths make them faster
//
// Shared memory of a block, 180376 bytes
//          0  Q        fp16 [1][128][64], the query rows
//      16384  K        fp16 [3][1][128][64], the keys of 3 tiles
//      65536  V        fp16 [3][2][128][64], the values of 3 tiles, and ones
//     163840  O        fp16 [8][1][16][64], output rows of each warp on their way
//     180224  BARRIERS mbarrier [2 + 4 * 3], see the kernel
//     180352  PLACES   int [2][3], which rows and head Q holds, and held before
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. Which tiles are visited
//     4. Loading tiles
//     5. The kernel: one warpgroup copies, the others multiply

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;
constexpr float softmax_scale = 0.125f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float EXPONENT_SCALE = softmax_scale * LOG2_E;  // exp(x) = 2^(x log2(e)); softmax_scale joins the factor
constexpr int BLOCK_Q = 128;  // query rows of a block
constexpr int BLOCK_KV = 128;  // keys of a tile
constexpr int THREADS = 384;
constexpr int Q_SMEM = 0;
constexpr int K_SMEM = 16384;
constexpr int V_SMEM = 65536;
constexpr int O_SMEM = 163840;
constexpr int BARRIERS_SMEM = 180224;
constexpr int PLACES_SMEM = 180352;
constexpr float SLACK = 8.0f;  // powers of 2 by which a score may exceed the kept maximum
constexpr float LARGE = 65536.0f;  // exponents beyond which the product of a maximum and EXPONENT_SCALE is too coarse
constexpr int MAX_CHAINS = 4;  // maxima of a row at once: comparisons that need not wait
constexpr int STAGES = 3;  // tiles of K, and of V, in shared memory
constexpr int CONSUMERS = 2;  // warpgroups that multiply, 64 rows each
constexpr int PRODUCER_REGISTERS = 40;  // of a thread
constexpr int CONSUMER_REGISTERS = 232;
constexpr int ROW_BYTES = 128;  // of 64 columns: a slab of a tile
constexpr int QK_SLABS = 1;
constexpr int V_SLABS = 1;
constexpr int OUTPUT_SLABS = 1;  // of a warp's rows on their way to global memory
constexpr int K_STEPS = HEAD_DIM / 16;  // steps of 16 over the head size
constexpr int Q_SLAB = BLOCK_Q * ROW_BYTES;  // bytes
constexpr int KV_SLAB = BLOCK_KV * ROW_BYTES;
constexpr int V_STAGE = (V_SLABS + 1) * KV_SLAB;  // with a slab of ones
constexpr int ONES = 8;  // columns of ones beside V, the fewest that wgmma multiplies
constexpr unsigned TWO_ONES = 0x3c003c00;  // 1.0 twice, in fp16

// 2. Primitives

// fp16: 1 sign, 5 exponent, 10 fraction bits.
struct fp16 { unsigned short bits; };

// Two neighbouring elements of a fragment in one register, `low` in the lower half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// 2^x on the special function unit; a denormal counts as 0. Relative error at most 2^-22 (PTX ISA, ex2.approx).
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x on the special function unit: within 1 in the last place (PTX ISA, rcp.approx); x is no denormal.
__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// threadIdx.x, read anew at each call: what was computed from it before need not stay in a register.
__device__ __forceinline__ unsigned thread_index() {
    unsigned index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// An mbarrier: eight bytes of shared memory that count, in phases, threads that arrive and bytes that copies bring. A phase
// completes when `arrivals` threads have arrived and all bytes that they announced are there; then the next one begins.

// One thread does this once for each barrier, then a fence for the copy engine, then all meet at __syncthreads().
__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier_smem, unsigned arrivals) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Counts one arrival. What this thread did before is seen by whoever waits for the phase.
__device__ __forceinline__ void mbarrier_arrive(unsigned long long* barrier_smem) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Announces `bytes` that copies will bring in this phase, and counts one arrival.
__device__ __forceinline__ void mbarrier_expect_bytes(unsigned long long* barrier_smem, unsigned bytes) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity: phases 0, 2, 4, ... have parity 0. Before the first phase has ended the one
// of parity 1 counts as ended: a producer's first wait for an empty buffer passes at once.
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

// What the host says about a tensor in global memory: its address, sizes, strides, the box of one copy, its swizzle. A kernel
// takes it as `const __grid_constant__ TensorMap` and passes its address on.
struct alignas(64) TensorMap { unsigned char opaque[128]; };

// What L2 does with the lines of a copy (createpolicy's constants).
constexpr unsigned long long L2_EVICT_FIRST = 0x12F0000000000000;
constexpr unsigned long long L2_EVICT_LAST = 0x14F0000000000000;

// Copies the box at coordinates (c0, c1, c2, c3), c0 the innermost, to shared memory in the background, with zeros for what
// lies outside the tensor; one thread issues it. Its bytes, those zeros too, count at `barrier_smem`.
__device__ __forceinline__ void tma_load(void* to_smem, const TensorMap* map, unsigned long long* barrier_smem, int c0, int c1,
                                         int c2, int c3, unsigned long long l2_hint) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(to_smem);
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barrier_smem);
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, { %2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(l2_hint)
        : "memory");
}

// Copies a box from shared memory to the tensor at (c0, c1, c2, c3) in the background; what lies past the tensor's end is not
// written. One thread issues it, when all writers of the box have done async_proxy_fence() and then met it at a barrier.
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

// Waits until at most PENDING of this thread's latest groups are still under way; what the others wrote can be seen then.
template <int PENDING> __device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory: lane i gives the address of a row (row i % 8 of matrix i / 8) and, of
// each matrix, elements [lane / 4][2 * (lane % 4)] and the next one.
__device__ __forceinline__ void stmatrix_x4(void* row_smem, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned row = (unsigned)__cvta_generic_to_shared(row_smem);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// TMA and wgmma do not see what threads wrote to shared memory before the writers do this, and then meet at a barrier.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Moves registers between warpgroups: a producer gives what consumers take. All four warps of a warpgroup do it; taking waits
// until enough have been given.
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Products of a warpgroup run in the background, in groups. From the issue of a product until its group has been waited for,
// its accumulators belong to it: no thread may read or write them.

// Before the first product, and after any other access to the registers of one: orders them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of products.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups are still under way.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// After wgmma_wait: keeps the compiler from moving a use of the accumulators to before it, where ptxas would have to wait too.
template <int N> __device__ __forceinline__ void wgmma_received(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Where an operand lies, in rows of 128 bytes with the 128-byte swizzle (the tile begins at a multiple of 1024 bytes).
// `stride_bytes`: from one group of eight rows to the next, 1024. `leading_bytes`: of an MN-major operand, from 64 of its rows
// or columns to the next 64; of a K-major one it is not used. Adding bytes / 16 to a descriptor moves it.
__device__ __forceinline__ unsigned long long smem_descriptor(const void* tile_smem, unsigned leading_bytes,
                                                              unsigned stride_bytes) {
    constexpr unsigned long long SWIZZLE_128_BYTES = 1ull << 62;
    const unsigned address = (unsigned)__cvta_generic_to_shared(tile_smem);
    const unsigned low = (leading_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
    return SWIZZLE_128_BYTES | (unsigned long long)(stride_bytes >> 4) << 32 | low;
}

// Four 8x8 matrices of 16-bit elements from shared memory: lane i gives the address of a row (row i % 8 of matrix i / 8) and
// receives, of each matrix, elements [lane / 4][2 * (lane % 4)] and the next one.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row_smem) {
    const unsigned row = (unsigned)__cvta_generic_to_shared(row_smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// D = A B, or D += A B where `accumulate` says so: A is 64x16, B 16x128, D in fp32. Thread t of the warpgroup has in
//   d[4 * j + 2 * h + e]: D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e]
//   a[2 * i + h]: A[16 * (t / 32) + t % 32 / 4 + 8 * h][2 * (t % 4) + 8 * i] and the next column
// B is K-major in shared memory.
__device__ __forceinline__ void wgmma_qk(float (&d)[64], const unsigned (&a)[4], unsigned long long b,
                                         bool accumulate) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
        "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
        "%60, %61, %62, %63}, "
        "{ %64, %65, %66, %67}, %68, p, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));
}

// D = A B, or D += A B where `accumulate` says so: A is 64x16, B 16x72, D in fp32. Thread t of the warpgroup has in
//   d[4 * j + 2 * h + e]: D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e]
//   a[2 * i + h]: A[16 * (t / 32) + t % 32 / 4 + 8 * h][2 * (t % 4) + 8 * i] and the next column
// B is MN-major in shared memory.
__device__ __forceinline__ void wgmma_pv(float (&d)[36], const unsigned (&a)[4], unsigned long long b,
                                         bool accumulate) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %41, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 "
        "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35}, "
        "{ %36, %37, %38, %39}, %40, p, 1, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));
}

// 3. Which tiles are visited
//
// Keys outside [begin, end) are allowed for no row of the block; keys inside [full_begin, full_end) for every row.

struct KvRange {
    int begin, end;
    int full_begin, full_end;
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

// 4. Loading tiles
//
// A tile in shared memory is slabs of 64 columns. A slab is rows of ROW_BYTES; the eight 16-byte chunks of a row are permuted
// by exclusive or with the row's number modulo 8, as TMA writes and wgmma reads them: the swizzle of 128 bytes.

// The rows of one head from `row` on, copied in the background; their bytes count at `full`. Columns past the head size and
// rows past the last one arrive as zeros.
template <int ROWS, int SLABS>
__device__ __forceinline__ void load_tile_async(unsigned char* tile, const TensorMap* map, unsigned long long* full, int row,
                                                int h_idx, int b_idx, unsigned long long l2_hint) {
    mbarrier_expect_bytes(full, SLABS * ROWS * ROW_BYTES);
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab)
        tma_load(tile + slab * ROWS * ROW_BYTES, map, full, 64 * slab, row, h_idx, b_idx, l2_hint);
}

// A stage of K or V, and the parity of the phase that its barriers are in: both change as tiles go round.
struct Stage {
    int index;
    unsigned phase;
    __device__ __forceinline__ void advance() {
        if (++index == STAGES) index = 0, phase ^= 1;
    }
};

constexpr int END = -1;  // in the place of a block of rows: there is no more work

// 5. The kernel: one warpgroup copies, the others multiply
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
// There is one block for each SM. It takes BLOCK_Q rows of a head, the longest first, then the next that no block has taken.
// Warpgroup 0 copies; each of the others multiplies 64 rows, and while the tensor cores work on Q K^T of the next tile and on
// P V of this one, its threads compute the softmax between the two:
//
//     producer     K0  K1  K2 ...                                         each as soon as a stage is empty
//                  V0  V1  V2 ...
//     products     Q K0 | Q K1, P0 V0 | Q K2, P1 V1 | ... | Pn Vn
//     weights             P0 |          P1 |          P2 ...
//
// In the fragments of S and O lane l has, of the 16 rows that a product gives its warp, l / 4 and l / 4 + 8, and of every 8
// columns 2 * (l % 4) and the next; the four lanes with one l / 4 share a row.

// The largest over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// The rows and the head of a block. Blocks are numbered by sections of heads, so that those that run together are neighbours
// in a few heads, and read the same keys and values from L2; and of a section the last rows come first: under a causal mask
// they have most to do.
struct Place {
    int q_block, h_idx, b_idx;
};
__device__ __forceinline__ Place place_of(int block, int blocks, int q_heads, int q_len, int section) {
    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    const int first = block / (section * q_blocks) * section;  // head of the section
    const int here = min(section, blocks / q_blocks - first);  // heads: the last section may have fewer
    const int in_section = block - first * q_blocks;
    const int rows_after = in_section / here;
    const int head = first + in_section % here;
    return {q_blocks - 1 - rows_after, head % q_heads, head / q_heads};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gpt2_hopper(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap o_map,
    unsigned* next_work,  // [1]
    int batch, int q_heads, int kv_heads, int q_len, int kv_len,
    int section_heads)  // query heads whose blocks are numbered together
{
    extern __shared__ __align__(1024) unsigned char smem[];
    unsigned char* Q_smem = smem + Q_SMEM;  // [QK_SLABS][BLOCK_Q][64]
    unsigned char* K_smem = smem + K_SMEM;  // [STAGES][QK_SLABS][BLOCK_KV][64]
    unsigned char* V_smem = smem + V_SMEM;  // [STAGES][V_SLABS + 1][BLOCK_KV][64], the last slab of a stage ones
    unsigned char* O_smem = smem + O_SMEM;  // [4 * CONSUMERS][OUTPUT_SLABS][16][64], the rows of each warp
    volatile Place* places = (volatile Place*)(smem + PLACES_SMEM);  // [2], of the rows in Q_smem: by the parity of their phase

    // full: who copies arrives once, with the bytes of its copies; who multiplies waits before it reads.
    // empty: a thread of a consumer arrives when its products have read the stage. For Q each thread of the
    // consumers does, and the one that copies V, which reads whose rows they are. The producer waits before it
    // copies.
    // The output leaves by copies of each warp's own: it waits until they have read O_smem before it writes there again.
    unsigned long long *q_full = (unsigned long long*)(smem + BARRIERS_SMEM), *q_empty = q_full + 1;
    unsigned long long *k_full = q_empty + 1, *k_empty = k_full + STAGES;  // [STAGES] each
    unsigned long long *v_full = k_empty + STAGES, *v_empty = v_full + STAGES;
    if (threadIdx.x == 0) {
        mbarrier_init(q_full, 1);
        mbarrier_init(q_empty, 128 * CONSUMERS + 1);  // threads that multiply, and who copies V
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(k_full + stage, 1);
            mbarrier_init(v_full + stage, 1);
            mbarrier_init(k_empty + stage, CONSUMERS);
            mbarrier_init(v_empty + stage, CONSUMERS);
        }
    }
    for (int stage = 0; stage < STAGES; ++stage)
        for (int i = threadIdx.x; i < KV_SLAB / 4; i += THREADS)
            ((unsigned*)(V_smem + stage * V_STAGE + V_SLABS * KV_SLAB))[i] = TWO_ONES;
    async_proxy_fence();  // TMA and wgmma are to see what threads wrote
    __syncthreads();  // the barriers and the ones are there; after this no wait is for the whole block

    const int works = (q_len + BLOCK_Q - 1) / BLOCK_Q * q_heads * batch;  // pieces of work: BLOCK_Q rows of a head each
    // the same for all lanes of a warp, which the compiler cannot know of threadIdx.x
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

    // The tiles to visit for a block of rows, from the last to the first: [begin, end); those [full_begin, full_end) are full
    struct Tiles {
        int begin, end, full_begin, full_end;
    };
    const auto tiles_of = [&](int q_block) -> Tiles {
        const int q_lo = q_block * BLOCK_Q;
        const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
        const KvRange range = kv_range(q_lo, q_hi, kv_len);
        const int tile_begin = range.begin / BLOCK_KV;
        const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
        const int full_tile_begin = (range.full_begin + BLOCK_KV - 1) / BLOCK_KV;
        const int full_tile_end = range.full_end / BLOCK_KV;

        return {tile_begin, tile_end, full_tile_begin, full_tile_end};
    };
    // The producer's first thread copies Q and K of every piece of work, and says whose they are
    const auto produce_keys = [&] {
        Stage k = {0, 0};
        unsigned q_phase = 0;
        int work = blockIdx.x;
        while (work < works) {
            const Place place = place_of(work, works, q_heads, q_len, section_heads);
            const int q_block = place.q_block, h_idx = place.h_idx, b_idx = place.b_idx;
            const int kv_h_idx = h_idx / (q_heads / kv_heads);
            work = gridDim.x + atomicInc(next_work, works - 1);  // after all have been taken it is zero again
            const Tiles tiles = tiles_of(q_block);
            const auto load_q = [&] {
                mbarrier_wait(q_empty, q_phase ^ 1);
                places[q_phase].q_block = q_block, places[q_phase].h_idx = h_idx, places[q_phase].b_idx = b_idx;
                load_tile_async<BLOCK_Q, QK_SLABS>(Q_smem, &q_map, q_full, q_block * BLOCK_Q, h_idx, b_idx, L2_EVICT_FIRST);
            };
            load_q();
            const auto load_keys = [&](int tile) {
                mbarrier_wait(k_empty + k.index, k.phase ^ 1);
                load_tile_async<BLOCK_KV, QK_SLABS>(K_smem + k.index * QK_SLABS * KV_SLAB, &k_map, k_full + k.index,
                                                    tile * BLOCK_KV, kv_h_idx, b_idx, L2_EVICT_LAST);
                k.advance();
            };
            for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) load_keys(tile);
            q_phase ^= 1;
        }
        mbarrier_wait(q_empty, q_phase ^ 1);
        places[q_phase].q_block = END;
        mbarrier_arrive(q_full);
    };
    // A thread of its second warp copies V
    const auto produce_values = [&] {
        Stage v = {0, 0};
        for (unsigned q_phase = 0;; q_phase ^= 1) {
            mbarrier_wait(q_full, q_phase);
            const int q_block = places[q_phase].q_block;
            if (q_block == END) break;
            const int h_idx = places[q_phase].h_idx, b_idx = places[q_phase].b_idx;
            mbarrier_arrive(q_empty);
            const int kv_h_idx = h_idx / (q_heads / kv_heads);
            const auto load_values = [&](int tile) {
                mbarrier_wait(v_empty + v.index, v.phase ^ 1);
                load_tile_async<BLOCK_KV, V_SLABS>(V_smem + v.index * V_STAGE, &v_map, v_full + v.index,
                                                   tile * BLOCK_KV, kv_h_idx, b_idx, L2_EVICT_LAST);
                v.advance();
            };
            const Tiles tiles = tiles_of(q_block);
            for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) load_values(tile);
        }
    };
    if (warpgroup == 0) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce_keys();
        if (threadIdx.x == 32) produce_values();
        return;
    }

    take_registers<CONSUMER_REGISTERS>();

    const int consumer = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32;
    const int warp_row = 64 * consumer + 16 * (thread / 32);  // of BLOCK_Q
    const int lane_row = warp_row + lane / 4;                 // this lane's first row; the other is 8 further
    // descriptors count in 16 bytes
    const unsigned long long k_at = smem_descriptor(K_smem, 0, 8 * ROW_BYTES);
    const unsigned long long v_at = smem_descriptor(V_smem, KV_SLAB, 8 * ROW_BYTES);

    float O_frag[(HEAD_DIM_V + ONES) / 2], S[BLOCK_KV / 2];
    unsigned P_frag[BLOCK_KV / 16][4];
    unsigned Q_frag[K_STEPS][4];
    float row_max[2], alpha[2];
    float shift[2];  // what the exponents of a row's weights lack: row_max * EXPONENT_SCALE, or 0
    float limit[2];  // the largest score that does not change row_max; -INF: each tile does
    Stage k = {0, 0}, v = {0, 0};
    unsigned q_phase = 1;  // of the rows at hand
    int q_block, q_lo, tile;
    bool any;  // whether there is a tile to visit
    Tiles tiles;

    // S = Q K^T, issued
    const auto issue_qk = [&](int stage) {
        const unsigned long long k_tile = k_at + stage * (QK_SLABS * KV_SLAB / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
            wgmma_qk(S, Q_frag[step], k_tile + step / 4 * (KV_SLAB / 16) + step % 4 * 2, step > 0);
        wgmma_commit();
    };
    bool begun;  // whether O has a product of these rows
    // O += P V, issued, and in the columns of ones the sums of P's rows
    const auto issue_pv = [&](int stage) {
        const unsigned long long v_tile = v_at + stage * (V_STAGE / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_KV / 16; ++step)
            wgmma_pv(O_frag, P_frag[step], v_tile + step * (16 * ROW_BYTES / 16), begun || step > 0);
        wgmma_commit();
        begun = true;
    };
    // The weights of a tile take the place of its scores. Returns whether O must be multiplied by alpha first.
    const auto weigh = [&](int tile, bool partial, bool first = false) {
        const int kv_lo = tile * BLOCK_KV;
        if (partial) {  // each row has one range of keys
            const int first_key = kv_lo + lane % 4 * 2;
            int upto[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int q_idx = q_lo + lane_row + 8 * r;
                const KvRange allowed = kv_range(q_idx, q_idx, kv_len);
                upto[r] = allowed.end - first_key;
            }
#pragma unroll
            for (int i = 0; i < BLOCK_KV / 2; ++i) {
                const int r = i / 2 % 2, key = i / 4 * 8 + i % 2;
                if (key >= upto[r]) S[i] = -INF;
            }
        }
        // online softmax. An old maximum serves as long as no score of the row exceeds its limit: exp2 then stays below
        // 2^SLACK, and what was summed need not be rescaled. Each lane looks at its own scores; the bits of floats that are not
        // negative have the order of integers, of which the GPU compares three at once. With a negative limit floats are asked
        int most[2][MAX_CHAINS];
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; ++i) {
            int& chain = most[i / 2 % 2][i / 4 % MAX_CHAINS];
            chain = i < 4 * MAX_CHAINS && i % 2 == 0 ? __float_as_int(S[i]) : max(chain, __float_as_int(S[i]));
        }
        bool exceeds = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int chain = 1; chain < MAX_CHAINS; ++chain) most[r][0] = max(most[r][0], most[r][chain]);
            exceeds |= most[r][0] > __float_as_int(limit[r]) || limit[r] < 0.0f;
        }
        const bool rescale = first || __any_sync(0xffffffff, exceeds);
        if (rescale) {  // with the maximum of the whole row
            float new_max[2] = {row_max[0], row_max[1]}, offset[2];
            if ((first && partial) || __any_sync(0xffffffff, min(most[0][0], most[1][0]) < 0)) {
#pragma unroll
                for (int i = 0; i < BLOCK_KV / 2; ++i) new_max[i / 2 % 2] = fmaxf(new_max[i / 2 % 2], S[i]);
            } else {
#pragma unroll
                for (int r = 0; r < 2; ++r) new_max[r] = fmaxf(new_max[r], __int_as_float(most[r][0]));
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                new_max[r] = quad_max(new_max[r]);
                const float finite_max = new_max[r] == -INF ? 0.0f : new_max[r];  // no key yet: exp2(-inf - 0) = 0, not NaN
                alpha[r] = fast_exp2((row_max[r] - finite_max) * EXPONENT_SCALE);  // 1 under the same maximum
                row_max[r] = new_max[r];
                shift[r] = finite_max * EXPONENT_SCALE;
                const bool large = fabsf(shift[r]) > LARGE;
                offset[r] = large ? finite_max : 0.0f;
                if (large) shift[r] = 0.0f;
                limit[r] = large ? -INF : new_max[r] + SLACK / EXPONENT_SCALE;
            }
            // A large maximum is subtracted from the scores before the scale multiplies them: difference and weights are exact.
            // The row's limit, -INF, brings each of its tiles here
            if (__any_sync(0xffffffff, offset[0] != 0.0f || offset[1] != 0.0f)) {
#pragma unroll
                for (int i = 0; i < BLOCK_KV / 2; ++i) S[i] -= offset[i / 2 % 2];
            }
        }
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; ++i) S[i] = fast_exp2(S[i] * EXPONENT_SCALE - shift[i / 2 % 2]);
        return rescale;
    };
    // P as the A operand of P V: the fragments of S, rounded
    const auto round_weights = [&] {
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 4; ++i) P_frag[i / 4][i % 4] = pack(S[2 * i], S[2 * i + 1]);
    };
    const auto multiplied = [&](unsigned long long* empty) {  // products have read a stage
        if (thread == 0) mbarrier_arrive(empty);
    };

    // Q K^T of the first tile, by itself
    const auto first_scores = [&] {
        mbarrier_wait(k_full + k.index, k.phase);
        issue_qk(k.index);
        wgmma_wait<0>();
        wgmma_received(S);
    };
    // One tile further: Q K^T of the next tile beside P V of this one, then the next tile's weights
    const auto step = [&](int tile, bool partial) {
        mbarrier_wait(k_full + k.index, k.phase);
        issue_qk(k.index);
        mbarrier_wait(v_full + v.index, v.phase);
        issue_pv(v.index);
        wgmma_wait<1>();
        wgmma_received(S);
        multiplied(k_empty + k.index);
        k.advance();
        const bool rescale = weigh(tile, partial);
        wgmma_wait<0>();
        wgmma_received(O_frag);
        multiplied(v_empty + v.index);
        v.advance();
        if (rescale) {
#pragma unroll
            for (int i = 0; i < (HEAD_DIM_V + ONES) / 2; ++i) O_frag[i] *= alpha[i / 2 % 2];
        }
        round_weights();
    };

    // The rows are done: O = O / l. O leaves
    const auto finish = [&](const volatile Place& its_place) {
        const Place place = {its_place.q_block, its_place.h_idx, its_place.b_idx};
        // What depends on the lane is computed anew: until here it would cost registers
        const int lane = thread_index() % 32, warp = thread_index() / 32 - 4;
        const int first_row = place.q_block * BLOCK_Q + 16 * warp;
        float inverse_sum[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float row_sum = O_frag[HEAD_DIM_V / 2 + 2 * r];
            inverse_sum[r] = row_sum == 0.0f ? 0.0f : fast_reciprocal(row_sum);  // a row with no key gives 0
        }
        const auto out = [&](int i) {
            return pack(O_frag[i] * inverse_sum[i / 2 % 2], O_frag[i + 1] * inverse_sum[i / 2 % 2]);
        };
        // Through the warp's rows of O_smem, swizzled as TMA reads them; it writes no row past the last one
        unsigned char* const rows = O_smem + warp * (OUTPUT_SLABS * 16 * ROW_BYTES);
#pragma unroll
        for (int first = 0; first < V_SLABS; first += OUTPUT_SLABS) {
            if (lane == 0) tma_store_wait_read<0>();
            __syncwarp();
#pragma unroll
            for (int i = 32 * first; i < min(32 * (first + OUTPUT_SLABS), HEAD_DIM_V / 2); i += 8) {  // 16 columns each
                const int row = lane % 16, chunk = i % 32 / 4 + lane / 16;
                const bool both = i + 4 < HEAD_DIM_V / 2;
                stmatrix_x4(rows + ((i / 32 - first) * 16 + row) * ROW_BYTES + (chunk ^ row % 8) * 16, out(i), out(i + 2),
                            both ? out(i + 4) : 0, both ? out(i + 6) : 0);
            }
            __syncwarp();
            if (lane == 0) {
#pragma unroll
                for (int slab = first; slab < first + OUTPUT_SLABS; ++slab)
                    tma_store(&o_map, rows + (slab - first) * 16 * ROW_BYTES, 64 * slab, first_row, place.h_idx, place.b_idx);
                tma_store_commit();
            }
        }
    };

    // The next rows: their place, their first tile, Q
    const auto begin = [&] {
        q_phase ^= 1;
        mbarrier_wait(q_full, q_phase);
        q_block = places[q_phase].q_block;
        any = false;
        if (q_block == END) return;
        q_lo = q_block * BLOCK_Q;
        tiles = tiles_of(q_block);
        tile = tiles.end - 1;
        any = tile >= tiles.begin;
        // Q as A operands: lane l points at row l % 16, columns 8 * (l / 16) of each 16 x 16 block
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
            const int row = warp_row + lane % 16, chunk = step % 4 * 2 + lane / 16;
            ldmatrix_x4(Q_frag[step], Q_smem + step / 4 * Q_SLAB + row * ROW_BYTES + (chunk ^ row % 8) * 16);
        }
    };

    // The consumers: every piece of work, tile by tile
    begin();
    bool scored = false;  // whether S has the scores of the first tile
    while (q_block != END) {
        mbarrier_arrive(q_empty);  // each lane: it has read Q and the place. The next may come
        begun = false;
        for (int r = 0; r < 2; ++r) {
            row_max[r] = -INF;
            limit[r] = -INF;
        }
        if (!any) {
#pragma unroll
            for (int i = 0; i < (HEAD_DIM_V + ONES) / 2; ++i) O_frag[i] = 0.0f;
            finish(places[q_phase]);
            begin();
            continue;
        }
        if (!scored) first_scores();
        multiplied(k_empty + k.index);
        k.advance();
        const bool partial = tile < tiles.full_begin || tile >= tiles.full_end;
        if (partial) weigh(tile, true, true);
        else weigh(tile, false, true);
        round_weights();
        --tile;
#pragma unroll 1
        for (; tile >= max(tiles.full_end, tiles.begin); --tile) step(tile, true);
#pragma unroll 1
        for (; tile >= tiles.begin; --tile) step(tile, false);
        // The last P V of these rows, and beside it the first Q K^T of the next, under which O leaves. Both ways are
        // written out from issue to wait, without which ptxas lets no product run beside another
        begin();
        mbarrier_wait(v_full + v.index, v.phase);
        scored = any;
        if (scored) {
            issue_pv(v.index);
            mbarrier_wait(k_full + k.index, k.phase);
            issue_qk(k.index);
            wgmma_wait<1>();
            wgmma_received(O_frag);
            multiplied(v_empty + v.index);
            finish(places[q_phase ^ 1]);
            wgmma_wait<0>();
            wgmma_received(S);
        } else {
            issue_pv(v.index);
            wgmma_wait<0>();
            wgmma_received(O_frag);
            multiplied(v_empty + v.index);
            finish(places[q_phase ^ 1]);
        }
        v.advance();
    }
    if (lane == 0) tma_store_wait<0>();  // shared memory is the block's as long as it runs
}
