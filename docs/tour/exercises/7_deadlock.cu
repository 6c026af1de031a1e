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
//     warpgroups = 1 + 2: one copies; 2 compute 64 rows each: one computes weights while the products of another run
//     BLOCK_Q x BLOCK_KV = 128 x 128: the first preferred tile whose O, S and P fit a consumer's registers, and
//         whose stages fit shared memory
//     stages = 3: later tiles are copied while one is used
//     registers = 40 and 232 a thread: copying needs few; about 158 hold O, S and P
//     Q = in registers: its fragments take 16 registers a thread; its buffer is free for the next work tile
//     row sums = by P V: columns of ones beside V: threads add no weights, and the sum is that of the rounded
//         weights of P
//     during the last P V = the next work tile's Q K^T: its Q is in registers by then, so the tensor cores work
//         while O is stored
//     first P V = replaces O: O need not be set to zero before it
//     O in shared memory = 1 of 1 slabs a warp: of 64 columns; TMA copies them to global memory in the background
//     blocks = one for each SM: a persistent kernel: each block takes work tiles from a counter, those with the most
//         keys first
//     swizzle = 128 bytes: Q, K and V in slabs of 64 columns, 128 bytes a row, their chunks of 16 bytes permuted, so
//         that neither TMA nor wgmma meets a bank conflict
//     heads numbered together = by length: as many key/value heads as fit 32 MiB of L2, 32 to 128
//     other tiles = 256 x 64, 256 x 48, 192 x 128, 192 x 96, 192 x 64, 128 x 64: used instead for calls whose
//         lengths make them faster
//
// Shared memory of a block, 180376 bytes
//          0  Q        fp16 [1][128][64], the query rows
//      16384  K        fp16 [3][1][128][64], the keys of 3 tiles
//      65536  V        fp16 [3][2][128][64], the values of 3 tiles, and ones
//     163840  O        fp16 [8][1][16][64], output rows of each warp, on their way to global memory
//     180224  BARRIERS mbarrier [14], see the kernel
//     180352  WORK_TILES int [2][3], which rows and head Q holds now, and held before
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. Which tiles are visited
//     4. Loading tiles
//     5. Work tiles
//     6. The kernel: one warpgroup copies, the others multiply

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;
constexpr float softmax_scale = 0.125f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float EXPONENT_SCALE = softmax_scale * LOG2_E;  // exp(softmax_scale x) = 2^(EXPONENT_SCALE x)
constexpr int BLOCK_Q = 128;  // query rows of a block
constexpr int BLOCK_KV = 128;  // keys of a tile
constexpr int THREADS = 384;
constexpr int Q_SMEM = 0;
constexpr int K_SMEM = 16384;
constexpr int V_SMEM = 65536;
constexpr int O_SMEM = 163840;
constexpr int BARRIERS_SMEM = 180224;
constexpr int WORK_TILES_SMEM = 180352;
constexpr float RESCALE_THRESHOLD = 8.0f;  // an exponent may exceed that of the maximum in use by this much: a factor of 2^8
constexpr float LARGE = 65536.0f;  // above this magnitude, fp32 rounds maximum * EXPONENT_SCALE too coarsely
constexpr int MAX_CHAINS = 4;  // independent maxima of a row, so that comparisons do not wait for each other
constexpr int STAGES = 3;  // tiles of K, and of V, in shared memory
constexpr int CONSUMERS = 2;  // warpgroups that multiply, 64 rows each
constexpr int WARPGROUP_ROWS = 64;
constexpr int RELEASES = CONSUMERS;  // arrivals that empty a stage: one of each consumer
constexpr int PRODUCER_REGISTERS = 40;  // of a thread
constexpr int CONSUMER_REGISTERS = 232;
constexpr int ROWS = 2;  // of a thread
constexpr int ROW_BYTES = 128;  // a row of a slab: 64 columns of a tile
constexpr int QK_SLABS = 1;
constexpr int V_SLABS = 1;
constexpr int OUTPUT_SLABS = 1;  // of a warp's rows on their way to global memory
constexpr int K_STEPS = HEAD_DIM / 16;  // steps of 16 over the head size
constexpr int ONES = 8;  // columns of ones beside V, the fewest that wgmma multiplies
constexpr unsigned TWO_ONES = 0x3c003c00;  // 1.0 twice, in fp16
constexpr int OUTPUT_COLUMNS = HEAD_DIM_V + ONES;  // of O in registers, and of the row sums beside it

// 2. Primitives

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

// D = A B, or D += A B if `accumulate`: A is 64x16, B 16x128, D in fp32. Thread t of the warpgroup has in
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

// D = A B, or D += A B if `accumulate`: A is 64x16, B 16x72, D in fp32. Thread t of the warpgroup has in
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
using QTile = SlabTile<BLOCK_Q, QK_SLABS>;
using KTile = SlabTile<BLOCK_KV, QK_SLABS>;
using VTile = SlabTile<BLOCK_KV, V_SLABS, 1>;  // with a slab of ones
using OTile = SlabTile<16, OUTPUT_SLABS>;  // output rows of a warp

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

// 6. The kernel: one warpgroup copies, the others multiply
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
// There is one block for each SM. A work tile is BLOCK_Q rows of a head. A block takes the next work tile that no block has
// taken; those with the most keys come first. Warpgroup 0, the producer, copies. The others, the consumers, multiply 64 rows
// each. While the tensor cores compute Q K^T of the next tile and P V of this one, the threads compute the softmax
// between the two:
//
//     producer     K0  K1  K2 ...                                         each as soon as a stage is empty
//                  V0  V1  V2 ...
//     products     Q K0 | Q K1, P0 V0 | Q K2, P1 V1 | ... | Pn Vn
//     weights             P0 |          P1 |          P2 ...
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

// What the roles of a block share: the arguments of the call, and shared memory with the mbarriers that guard it.
struct Block {
    const TensorMap *q_map, *k_map, *v_map, *o_map;
    unsigned* next_work;
    int batch, q_heads, kv_heads, q_len, kv_len, heads_in_l2;

    QTile q;  // the rows of the current work tile
    Pipeline<KTile> k;
    Position k_at;  // where this role is in `k`, and below in the others
    Pipeline<VTile> v;  // with a slab of ones
    Position v_at;
    OTile o;         // first of [4 * CONSUMERS]: the rows of each warp on their way to global memory
    // full: when the work tile is written and its rows of Q have arrived. empty: when each thread of the consumers has read both,
    // and the one that copies V the work tile
    Pipeline<volatile TileFeed*> feed;
    Position work_at;

    __device__ __forceinline__ const volatile WorkTile& current_work() const { return feed.first->works[work_at.phase]; }
    __device__ __forceinline__ const volatile WorkTile& previous_work() const { return feed.first->works[work_at.phase ^ 1]; }
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
            mbarrier_init(feed.empty, 128 * CONSUMERS + 1);  // consumer threads, and the one that copies V
            for (int stage = 0; stage < STAGES; ++stage) {
                mbarrier_init(k.full + stage, 1);
                mbarrier_init(v.full + stage, 1);
                mbarrier_init(k.empty + stage, RELEASES);
                mbarrier_init(v.empty + stage, RELEASES);
            }
        }
        for (int stage = 0; stage < STAGES; ++stage)
            for (int i = threadIdx.x; i < VTile::SLAB_BYTES / 4; i += THREADS)
                ((unsigned*)(v.first.smem + stage * VTile::BYTES + V_SLABS * VTile::SLAB_BYTES))[i] = TWO_ONES;
        async_proxy_fence();  // makes what threads wrote visible to TMA and wgmma
        __syncthreads();  // what is written here is there; after this no wait is for the whole block
    }
};

// The producer warpgroup: loads. A few of its threads copy, as far ahead of the products as there are empty buffers.
struct Producer : Block {
    // One thread: takes work tiles until none is left; publishes each and copies its queries and keys
    __device__ __forceinline__ void load_queries_and_keys() {
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

    // Publishes a work tile to all roles, and copies its rows of Q
    __device__ __forceinline__ void publish(int q_block, int h_idx, int b_idx) {
        feed.acquire(work_at);
        feed.first->write(work_at, {q_block, h_idx, b_idx});
        q.load_async({q_map, h_idx, b_idx}, feed.full, q_block * BLOCK_Q, L2_EVICT_FIRST);
    }

    // Copies the keys of a tile as soon as a stage is empty
    __device__ __forceinline__ void load_key_tile(int tile, const HeadRows& keys) {
        k.acquire(k_at);
        k.load_async(k_at.index, keys, tile * BLOCK_KV);
        k_at.advance(STAGES);
    }

    // One thread: copies the values of each work tile
    __device__ __forceinline__ void load_values() {
        for (;; work_at.advance(1)) {
            feed.wait_full(work_at);
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
        v.load_async(v_at.index, values, tile * BLOCK_KV);
        v_at.advance(STAGES);
    }
};

// A consumer thread's registers of the matrices: accumulators S and O, operands P and Q.
struct Fragments {
    float S[BLOCK_KV / 2], O[OUTPUT_COLUMNS / 2];
    unsigned P[BLOCK_KV / 16][4];
    unsigned Q[K_STEPS][4];
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
// calls find_largest, raise_maxima and compute_weights; if raise_maxima returns true, it multiplies O by alpha.
struct RowSoftmax {
    float max[ROWS];      // the maximum in use, which may be less than the largest score
    float alpha[ROWS];    // the factor for sums under the previous maximum
    float shift[ROWS];    // subtracted from exponents: max * EXPONENT_SCALE, or 0
    float limit[ROWS];    // the largest score that does not change the maximum; -INF: every tile changes it
    int largest[ROWS];    // this lane's largest score of the tile, as bits

    // The row, 0 to ROWS - 1, of register i of N: a pair of rows has 2 * N / ROWS of them, two in turn for each
    template <int N> static __device__ constexpr int row_of(int i) { return i / (2 * N / ROWS) * 2 + i / 2 % 2; }

    // Row r before its first tile
    __device__ __forceinline__ void begin(int r) {
        max[r] = -INF;
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
#pragma unroll
        for (int i = 0; i < N; ++i) S[i] = fast_exp2(S[i] * EXPONENT_SCALE - shift[row_of<N>(i)]);
    }
};

// A consumer warpgroup: computes. Each of its threads has the members in registers.
struct Consumer : Block {
    int consumer, thread, lane;  // numbers: of this warpgroup among consumers, of this thread in it, of this thread in its warp
    int lane_row;  // this lane's first row in the block; its second is 8 further
    unsigned k_operand, v_operand;  // stage 0's

    Fragments& frag;
    RowSoftmax& softmax;

    // The current work tile
    int q_block, q_lo, tile;
    bool any;  // whether it has a tile to visit
    bool begun;  // whether O has a product of these rows
    TileRange tiles;

    __device__ __forceinline__ Consumer(const Block& block, int number, Fragments& frag, RowSoftmax& softmax)
        : Block(block), consumer(number), frag(frag), softmax(softmax) {
        thread = threadIdx.x % 128, lane = thread % 32;
        lane_row = WARPGROUP_ROWS * consumer + 16 * (thread / 32) + lane / 4;
        k_operand = k.first.k_major(), v_operand = v.first.mn_major();
        work_at.phase = 1;  // the first next_work_tile() makes it 0
    }

    // Issues S = Q K^T
    __device__ __forceinline__ void issue_qk() {
        const unsigned long long k_tile = smem_descriptor(k_operand + k_at.index * (KTile::BYTES / 16));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
            wgmma_qk(frag.S, frag.Q[step], k_tile + KTile::k_major_step(step), step > 0);
        wgmma_commit();
    }

    // Issues O += P V; the columns of ones add up the rows of P
    __device__ __forceinline__ void issue_pv() {
        const unsigned long long v_tile = smem_descriptor(v_operand + v_at.index * (VTile::BYTES / 16));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_KV / 16; ++step)
            wgmma_pv(frag.O, frag.P[step], v_tile + VTile::mn_major_step(step), begun || step > 0);
        wgmma_commit();
        begun = true;
    }

    // Releases the stage that the products have read: the producer may copy the next tile there
    template <typename Tile> __device__ __forceinline__ void release_stage(const Pipeline<Tile>& ring, const Position& at) {
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

    // Q K^T of the first tile, with no other product in flight
    __device__ __forceinline__ void first_scores() {
        k.wait_full(k_at);
        issue_qk();
        wgmma_wait<0>();
        wgmma_received(frag.S);
    }

    // Moves to the next tile: its Q K^T overlaps with P V of this tile; then its weights are computed
    template <bool PARTIAL> __device__ __forceinline__ void step() {
        k.wait_full(k_at);
        issue_qk();
        v.wait_full(v_at);
        issue_pv();
        wgmma_wait<1>();
        wgmma_received(frag.S);
        release_stage(k, k_at);
        k_at.advance(STAGES);
        score_tile<PARTIAL>();
        const bool rescale = softmax_tile<PARTIAL, false>();
        wgmma_wait<0>();
        wgmma_received(frag.O);
        release_stage(v, v_at);
        v_at.advance(STAGES);
        round_weights();
        if (rescale) {
#pragma unroll
            for (int i = 0; i < OUTPUT_COLUMNS / 2; ++i) frag.O[i] *= softmax.alpha[row_in_pair(i)];
        }
    }

    // Finishes a work tile: O = O / l, and starts the copy of O to global memory
    __device__ __forceinline__ void epilogue(const volatile WorkTile& done) {
        const WorkTile at = {done.q_block, done.h_idx, done.b_idx};
        // Values that depend on the lane are recomputed: kept until here, they would cost registers
        const int lane = thread_index() % 32, warp = thread_index() / 32 - 4;
        const int first_row = at.q_block * BLOCK_Q + 16 * warp;
        float inverse_sum[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = frag.O[HEAD_DIM_V / 2 + 2 * r];
            inverse_sum[r] = sum == 0.0f ? 0.0f : fast_reciprocal(sum);  // a row with no key gives 0
        }
        const auto out = [&](int i) {  // registers i and i + 1 of O as they are stored
            return pack(frag.O[i] * inverse_sum[row_in_pair(i)], frag.O[i + 1] * inverse_sum[row_in_pair(i)]);
        };
        // O goes through the warp's own tile in shared memory, OUTPUT_SLABS slabs at a time. TMA writes no rows past the end
        const OTile rows = {o.smem + warp * OTile::BYTES};
#pragma unroll
        for (int first = 0; first < V_SLABS; first += OUTPUT_SLABS) {
            if (lane == 0) tma_store_wait_read<0>();  // earlier copies have read the tile
            __syncwarp();
#pragma unroll
            for (int i = 32 * first; i < min(32 * (first + OUTPUT_SLABS), HEAD_DIM_V / 2); i += 8) {  // 16 columns each
                const bool both = i + 4 < HEAD_DIM_V / 2;
                stmatrix_x4(rows.at(i / 32 - first, lane % 16, i % 32 / 4 + lane / 16), out(i), out(i + 2),
                            both ? out(i + 4) : 0, both ? out(i + 6) : 0);
            }
            async_proxy_fence();
            __syncwarp();
            if (lane == 0) {
#pragma unroll
                for (int slab = first; slab < first + OUTPUT_SLABS; ++slab)
                    tma_store(o_map, rows.smem + (slab - first) * OTile::SLAB_BYTES, 64 * slab, first_row, at.h_idx, at.b_idx);
                tma_store_commit();
            }
        }
    }

    // Moves to the next work tile: its coordinates, its first tile, its Q
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
        // Q as A operands: lane l points at row l % 16, columns 8 * (l / 16) of each 16 x 16 block. Values that depend on the
        // lane are recomputed: kept from the previous work tile, the addresses would cost registers
        const int lane = thread_index() % 32, warp = thread_index() / 32 - 4;
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
            ldmatrix_x4(frag.Q[step], q.at(step / 4, 16 * warp + lane % 16, step % 4 * 2 + lane / 16));
    }

    // Sets up each row before its first tile
    __device__ __forceinline__ void begin_rows() {
        begun = false;
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

    // Every work tile, tile by tile
    __device__ __forceinline__ void compute() {
        next_work_tile();
        bool scored = false;  // whether S has the scores of the first tile
        while (q_block != END) {
            feed.release(work_at);  // each lane has read Q and the work tile: the next may replace them
            begin_rows();
            if (!any) {
                clear_output();
                epilogue(current_work());
                next_work_tile();
                continue;
            }
            if (!scored) first_scores();
            release_stage(k, k_at);
            k_at.advance(STAGES);
            first_weights();
            --tile;
#pragma unroll 1
            for (; tile >= max(tiles.full_end, tiles.begin); --tile) step<true>();
#pragma unroll 1
            for (; tile >= tiles.begin; --tile) step<false>();
            // The last P V of this work tile overlaps with the first Q K^T of the next one, and that with storing O. Each
            // branch has everything from issue to wait: otherwise ptxas serializes the products
            next_work_tile();
            v.wait_full(v_at);
            scored = any;
            if (scored) {
                issue_pv();
                k.wait_full(k_at);
                issue_qk();
                wgmma_wait<1>();
                wgmma_received(frag.O);
                release_stage(v, v_at);
                epilogue(previous_work());
                wgmma_wait<0>();
                wgmma_received(frag.S);
            } else {
                issue_pv();
                wgmma_wait<0>();
                wgmma_received(frag.O);
                release_stage(v, v_at);
                epilogue(previous_work());
            }
            v_at.advance(STAGES);
        }
        if (lane == 0) tma_store_wait<0>();  // the copies read shared memory, which the block frees when it ends
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gpt2_hopper(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap o_map,
    unsigned* next_work,  // [1]
    int batch, int q_heads, int kv_heads, int q_len, int kv_len,
    int heads_in_l2)  // query heads whose blocks are numbered together
{
    extern __shared__ __align__(1024) unsigned char smem[];

    unsigned long long* const work_full = (unsigned long long*)(smem + BARRIERS_SMEM);
    unsigned long long *const k_full = work_full + 2, *const v_full = k_full + 2 * STAGES;
    const Block block = {
        &q_map, &k_map, &v_map, &o_map,
        next_work,
        batch, q_heads, kv_heads, q_len, kv_len, heads_in_l2,
        {smem + Q_SMEM},
        {{{smem + K_SMEM}, k_full}, k_full + STAGES}, {},
        {{{smem + V_SMEM}, v_full}, v_full + STAGES}, {},
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
        if (threadIdx.x == 0) producer.load_queries_and_keys();
        if (threadIdx.x == 32) producer.load_values();
    } else {
        take_registers<CONSUMER_REGISTERS>();
        // Not members of Consumer: the compiler keeps an object with arrays in registers only if loops over these are unrolled
        Fragments frag;
        RowSoftmax softmax;
        Consumer consumer(block, warpgroup - 1, frag, softmax);
        consumer.compute();
    }
}
