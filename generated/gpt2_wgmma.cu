// gpt2, wgmma
// ===========
//
//     attention gpt2 {
//         dtype     fp16
//         head_dim  64
//         scale     0.125
//         mask      q >= k
//         kernel    wgmma { tile 128 x 128  stages 2 }
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
//
// Plan, for sm_90a (Hopper: H100, H200)
//     schedule = wgmma: fp16 on tensor cores by wgmma, tiles copied by TMA, which sm_90a has
//     BLOCK_Q x BLOCK_KV = 128 x 128: stated in the spec
//     warps = 8: a warpgroup of four multiplies 64 rows; each warp has 16 of them
//     stages = 2: the next K and V are copied while these are used
//     Q = in shared memory: wgmma reads it there, as it does K and V
//     swizzle = 128 bytes: Q, K and V in slabs of 64 columns, 128 bytes a row, their chunks of 16 bytes permuted, so
//         that neither TMA nor wgmma meets a bank conflict
//     heads numbered together = by length: as many key/value heads as fit 32 MiB of L2, 32 to 128
//
// Shared memory of a block, 82060 bytes
//          0  Q        fp16 [1][128][64], the block's query rows, in the end its output
//      16384  K        fp16 [2][1][128][64], the keys of 2 tiles
//      49152  V        fp16 [2][1][128][64], the values of 2 tiles
//      81920  BARRIERS mbarrier [5], see the kernel
//      82048  WORK_TILE int [3], which rows and head the block computes
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. This variant's score and mask
//     4. Which tiles are visited
//     5. Loading tiles
//     6. The fused kernel

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;
constexpr float softmax_scale = 0.125f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float EXPONENT_SCALE = softmax_scale * LOG2_E;  // exp(softmax_scale x) = 2^(EXPONENT_SCALE x)
constexpr int BLOCK_Q = 128;  // query rows of a block
constexpr int BLOCK_KV = 128;  // keys of a tile
constexpr int THREADS = 256;
constexpr int Q_SMEM = 0;
constexpr int K_SMEM = 16384;
constexpr int V_SMEM = 49152;
constexpr int BARRIERS_SMEM = 81920;
constexpr int WORK_TILE_SMEM = 82048;
constexpr float RESCALE_THRESHOLD = 8.0f;  // an exponent may exceed that of the maximum in use by this much: a factor of 2^8
constexpr float LARGE = 65536.0f;  // above this magnitude, fp32 rounds maximum * EXPONENT_SCALE too coarsely
constexpr int BLOCKS = 2;  // that an SM should hold at once: it limits the registers of a thread
constexpr int ROW_THREADS = 64;  // the block's threads as a grid over a tile: its rows
constexpr int COLUMN_THREADS = 4;  // and its columns
constexpr int ROWS = BLOCK_Q / ROW_THREADS;  // of a thread
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;  // keys of a thread in a tile
constexpr int DIMS = HEAD_DIM_V / COLUMN_THREADS;  // dimensions of O of a thread
constexpr int ROW_BLOCKS = ROWS / 2;  // blocks of 16 rows of a warp
constexpr int STAGES = 2;  // tiles of K, and of V, in shared memory
constexpr int ROW_BYTES = 128;  // a row of a slab: 64 columns of a tile
constexpr int QK_SLABS = 1;
constexpr int V_SLABS = 1;
constexpr int K_STEPS = HEAD_DIM / 16;  // steps of 16 over the head size

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

// Required between writes of threads to shared memory and reads of the same by TMA or wgmma: the writers call this, and then
// a barrier follows.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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
// A is K-major in shared memory.
// B is K-major in shared memory.
__device__ __forceinline__ void wgmma_qk(float (&d)[64], unsigned long long a, unsigned long long b,
                                         bool accumulate) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
        "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
        "%60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"((int)accumulate));
}

// D = A B, or D += A B if `accumulate`: A is 64x16, B 16x64, D in fp32. Thread t of the warpgroup has in
//   d[4 * j + 2 * h + e]: D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e]
//   a[2 * i + h]: A[16 * (t / 32) + t % 32 / 4 + 8 * h][2 * (t % 4) + 8 * i] and the next column
// B is MN-major in shared memory.
__device__ __forceinline__ void wgmma_pv(float (&d)[32], const unsigned (&a)[4], unsigned long long b,
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

// 5. Loading tiles

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
using VTile = SlabTile<BLOCK_KV, V_SLABS>;

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

// A ring with a position of its own.
template <typename Tile> struct TurningRing : Ring<Tile> {
    Position at;
};

// 6. The fused kernel
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
// A block computes BLOCK_Q rows, each warp its share of them.
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
struct alignas(16) Chunk {  // 16 bytes, which a lane loads or stores at once
    unsigned words[4];
};

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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gpt2_wgmma(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    fp16* O,  // [batch, q_heads, q_len, 64]
    long long o_stride_b, long long o_stride_h, long long o_stride_s,
    int q_heads, int kv_heads, int q_len, int kv_len,
    int heads_in_l2)  // query heads whose blocks are numbered together
{
    extern __shared__ __align__(1024) unsigned char smem[];
    const QTile q = {smem + Q_SMEM};

    // Barriers `full`: the thread that copies arrives once and announces the bytes; all threads wait before they multiply.
    unsigned long long* q_full = (unsigned long long*)(smem + BARRIERS_SMEM);
    TurningRing<KTile> k = {{{smem + K_SMEM}, q_full + 1}};
    TurningRing<VTile> v = {{{smem + V_SMEM}, k.full + STAGES}};
    if (threadIdx.x == 0) {
        mbarrier_init(q_full, 1);
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(k.full + stage, 1);
            mbarrier_init(v.full + stage, 1);
        }
    }
    async_proxy_fence();  // makes what threads wrote visible to TMA and wgmma

    const WorkTile work_tile = work_tile_of(blockIdx.x, gridDim.x, q_heads, q_len, heads_in_l2);
    WorkTile* work_tile_smem = (WorkTile*)(smem + WORK_TILE_SMEM);
    if (threadIdx.x == 0) *work_tile_smem = work_tile;  // read again at the end; in between it would cost registers
    __syncthreads();  // the barriers are there
    const int q_block = work_tile.q_block, h_idx = work_tile.h_idx, b_idx = work_tile.b_idx;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int q_lo = q_block * BLOCK_Q;
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const int warp_row = 16 * ROW_BLOCKS * warp;  // the warp's first row in the block
    const int lane_row = warp_row + thread_index() % 32 / 4;  // the lane's first row in the block; each further one is 8 rows on
    const auto row_of = [&](int r) { return lane_row + 8 * r; };  // where the elements of S_frag and O_frag are
    const auto column_of = [&](int j) { return j / 2 * 8 + lane % 4 * 2 + j % 2; };

    if (threadIdx.x == 0) q.load_async({&q_map, h_idx, b_idx}, q_full, q_lo, L2_EVICT_FIRST);

    const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
    const KvRange range = kv_range(q_lo, q_hi, kv_len);
    const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_begin = (range.full_begin + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_end = range.full_end / BLOCK_KV;
    int tile = range.begin / BLOCK_KV;

    const auto load_k = [&](int tile, int stage) {
        if (threadIdx.x == 0) k.load_async(stage, {&k_map, kv_h_idx, b_idx}, tile * BLOCK_KV);  // the whole tile
    };
    const auto load_v = [&](int tile, int stage) {
        if (threadIdx.x == 0) v.load_async(stage, {&v_map, kv_h_idx, b_idx}, tile * BLOCK_KV);
    };
    if (tile < tile_end) load_k(tile, 0);
    if (tile < tile_end) load_v(tile, 0);

    // The operands of wgmma: the warpgroup's 64 rows of Q; K and V of stage 0
    const unsigned q_operand = QTile{q.smem + 64 * ROW_BYTES * (warp / 4)}.k_major();
    const unsigned k_operand = k.first.k_major(), v_operand = v.first.mn_major();
    mbarrier_wait(q_full, 0);  // Q is complete

    Fragment<DIMS> O_frag = {};
    RowSoftmax softmax;
    for (int r = 0; r < ROWS; ++r) {
        softmax.begin(r);
    }

    while (tile < tile_end) {
        const int kv_lo = tile * BLOCK_KV;
        const bool partial = tile < full_tile_begin || tile >= full_tile_end;
        const int following = tile + 1;
        __syncthreads();  // all threads are done with the previous tile: the next one may replace it
        if (following < tile_end) {
            load_k(following, k.at.index ^ 1);
            load_v(following, v.at.index ^ 1);
        }

        // S = Q K^T
        Fragment<COLUMNS> S_frag;
        const unsigned long long k_tile = smem_descriptor(k_operand + k.at.index * (KTile::BYTES / 16));
        k.wait_full(k.at);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
            wgmma_qk(S_frag.d, smem_descriptor(q_operand + QTile::k_major_step(step)),
                     k_tile + KTile::k_major_step(step), step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_received(S_frag.d);

        if (partial) {  // the pairs that the mask forbids, and keys past the end
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    const int q_idx = q_lo + row_of(r);
                    const int kv_idx = kv_lo + column_of(j);
                    const bool allowed = mask(q_idx, kv_idx);
                    if (kv_idx >= kv_len || !allowed) S_frag[r][j] = -INF;
                }
        }
        softmax.find_largest(S_frag.d);
        if (softmax.raise_maxima(S_frag.d)) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < DIMS; ++c) O_frag[r][c] *= softmax.alpha[r];
        }
        softmax.compute_weights(S_frag.d);  // the weights P take the place of S

        // O += P V. The D fragment of two neighbouring S blocks is the A fragment of P: no lane needs another's weights.
        unsigned P_frag[BLOCK_KV / 16][4];
        // P as the A operand of P V: the fragments of S, rounded
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 4; ++i) P_frag[i / 4][i % 4] = pack(S_frag.d[2 * i], S_frag.d[2 * i + 1]);
        const unsigned long long v_tile = smem_descriptor(v_operand + v.at.index * (VTile::BYTES / 16));
        v.wait_full(v.at);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_KV / 16; ++step)
            wgmma_pv(O_frag.d, P_frag[step], v_tile + VTile::mn_major_step(step), true);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_received(O_frag.d);
        k.at.advance(STAGES);
        v.at.advance(STAGES);
        tile = following;
    }

    // O goes through the warp's own rows of q: whole rows are then written, 16 bytes a lane
    const QTile o = {q.smem + warp_row * ROW_BYTES};
    const WorkTile end = *work_tile_smem;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float row_sum = quad_sum(softmax.sum[r]);
        // a row with no key gives 0
        const float inverse_sum = row_sum == 0.0f ? 0.0f : fast_reciprocal(row_sum);
        for (int j = 0; j < HEAD_DIM_V / 8; ++j)
            *(unsigned*)(o.at(j / 8, lane / 4 + 8 * r, j % 8) + lane % 4 * 4) =
                pack(O_frag[r][2 * j] * inverse_sum, O_frag[r][2 * j + 1] * inverse_sum);
    }
    __syncwarp();
    // A lane stores 16 bytes of every ROWS_AT_ONCE-th row, always of the same columns
    constexpr int ROW_LANES = HEAD_DIM_V / 8, ROWS_AT_ONCE = 32 / ROW_LANES;
    const int my_lane = opaque(lane), my_row = my_lane / ROW_LANES, first_row = end.q_block * BLOCK_Q + warp_row;
    const int rows = min(16 * ROW_BLOCKS, q_len - first_row);
    const int column = 8 * (my_lane % ROW_LANES);
    fp16* mine = O + end.b_idx * o_stride_b + end.h_idx * o_stride_h + (first_row + my_row) * o_stride_s + column;
#pragma unroll
    for (int row = 0; row < 16 * ROW_BLOCKS; row += ROWS_AT_ONCE) {
        if (row + my_row < rows) *(Chunk*)mine = *(const Chunk*)(o.at(column / 64, row + my_row, column / 8 % 8));
        mine += ROWS_AT_ONCE * o_stride_s;
    }
}
