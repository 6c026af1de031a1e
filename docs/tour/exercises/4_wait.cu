// gpt2, fused
// ===========
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
//
// Plan, for sm_80 (Ampere: A100)
//     schedule = fused_mma: fp16 on tensor cores (mma.sync, which sm_80 has)
//     BLOCK_Q x BLOCK_KV = 128 x 64: the fastest measured tile of which an SM has room for 2 blocks
//     warps = 4: 32 rows each: no warp needs the scores of another, and a fragment of K or V serves two products
//     stages = 2: the next K and V are copied while these are used
//     Q = in registers: its fragments take 32 registers a thread
//     copies = between products: issued when the first products of a tile are queued: the tensor cores work while
//         addresses are computed
//     rows in shared memory = padded by 8: the 8 rows that ldmatrix reads lie in different banks
//     heads numbered together = by length: as many key/value heads as fit 32 MiB of L2, 32 to 128
//
// Shared memory of a block, 55308 bytes
//          0  Q        fp16 [128][64 + 8], the block's query rows, in the end its output
//      18432  K        fp16 [2][64][64 + 8], the keys of 2 tiles
//      36864  V        fp16 [2][64][64 + 8], the values of 2 tiles
//      55296  WORK_TILE int [3], which rows and head the block computes
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
constexpr int BLOCK_KV = 64;  // keys of a tile
constexpr int THREADS = 128;
constexpr int Q_SMEM = 0;
constexpr int K_SMEM = 18432;
constexpr int V_SMEM = 36864;
constexpr int WORK_TILE_SMEM = 55296;
constexpr float RESCALE_THRESHOLD = 8.0f;  // an exponent may exceed that of the maximum in use by this much: a factor of 2^8
constexpr float LARGE = 65536.0f;  // above this magnitude, fp32 rounds maximum * EXPONENT_SCALE too coarsely
constexpr int ROW_THREADS = 32;  // the block's threads as a grid over a tile: its rows
constexpr int COLUMN_THREADS = 4;  // and its columns
constexpr int ROWS = BLOCK_Q / ROW_THREADS;  // of a thread
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;  // keys of a thread in a tile
constexpr int DIMS = HEAD_DIM_V / COLUMN_THREADS;  // dimensions of O of a thread
constexpr int ROW_BLOCKS = ROWS / 2;  // blocks of 16 rows of a warp
constexpr int K_STEPS = HEAD_DIM / 16;  // steps of 16 over the head size
constexpr int PAD = 8;
constexpr int QK_WIDTH = 16 * K_STEPS;
constexpr int Q_STRIDE = QK_WIDTH + PAD;
constexpr int K_STRIDE = QK_WIDTH + PAD;
constexpr int V_STRIDE = HEAD_DIM_V + PAD;

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
//
// A tile in shared memory is rows of fp16, each followed by PAD elements that are not used: the eight rows that an ldmatrix
// reads at once then start in different banks, since a row is an odd number of 16-byte chunks.

// A tile of TILE_ROWS rows in shared memory, STRIDE elements from row to row: COLUMNS elements of data, zeros up to WIDTH.
template <int TILE_ROWS, int COLUMNS, int WIDTH, int STRIDE> struct PaddedTile {
    static constexpr int ELEMENTS = TILE_ROWS * STRIDE;
    static constexpr int CHUNKS = WIDTH / 8;  // 16 bytes of a row each
    static constexpr int STEP = THREADS / CHUNKS;  // rows that the block copies at once
    static_assert(CHUNKS <= THREADS, "each chunk of a row has a thread");
    fp16* smem;

    // Copies the rows of `matrix` from `first` on in the background; all threads call it. Rows from `end` on arrive as zeros. A
    // thread copies 16 bytes of every STEP-th row, always of the same columns.
    __device__ __forceinline__ void load_async(const fp16* matrix, long long row_stride, int first, int end) const {
        const int thread = thread_index();  // read again at each call: row and column would cost registers between calls
        const int row = thread / CHUNKS, column = thread % CHUNKS * 8;
        const fp16* from = matrix + (first + row) * row_stride + column;
        fp16* to = smem + row * STRIDE + column;
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r += STEP) {
            const bool inside = first + row + r < end && column < COLUMNS;
            if (TILE_ROWS % STEP == 0 || r + row < TILE_ROWS) cp_async_16(to + r * STRIDE, from, inside);
            from += STEP * row_stride;
        }
    }
};
using QTile = PaddedTile<BLOCK_Q, HEAD_DIM, QK_WIDTH, Q_STRIDE>;
using KTile = PaddedTile<BLOCK_KV, HEAD_DIM, QK_WIDTH, K_STRIDE>;
using VTile = PaddedTile<BLOCK_KV, HEAD_DIM_V, HEAD_DIM_V, V_STRIDE>;

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

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_fused(
    const fp16* __restrict__ Q,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ K,  // [batch, kv_heads, kv_len, 64]
    const fp16* __restrict__ V,  // [batch, kv_heads, kv_len, 64]
    fp16* O,  // [batch, q_heads, q_len, 64]
    long long q_stride_b, long long q_stride_h, long long q_stride_s,
    long long k_stride_b, long long k_stride_h, long long k_stride_s,
    long long v_stride_b, long long v_stride_h, long long v_stride_s,
    long long o_stride_b, long long o_stride_h, long long o_stride_s,
    int q_heads, int kv_heads, int q_len, int kv_len,
    int heads_in_l2)  // query heads whose blocks are numbered together
{
    extern __shared__ __align__(16) unsigned char smem[];
    fp16* Q_smem = (fp16*)(smem + Q_SMEM);  // [BLOCK_Q][Q_STRIDE], in the end O
    fp16* K_smem = (fp16*)(smem + K_SMEM);  // [2][BLOCK_KV][K_STRIDE]
    fp16* V_smem = (fp16*)(smem + V_SMEM);  // [2][BLOCK_KV][V_STRIDE]

    const WorkTile work_tile = work_tile_of(blockIdx.x, gridDim.x, q_heads, q_len, heads_in_l2);
    WorkTile* work_tile_smem = (WorkTile*)(smem + WORK_TILE_SMEM);
    if (threadIdx.x == 0) *work_tile_smem = work_tile;  // read again at the end; in between it would cost registers
    const int q_block = work_tile.q_block, h_idx = work_tile.h_idx, b_idx = work_tile.b_idx;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int q_lo = q_block * BLOCK_Q;
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const int warp_row = 16 * ROW_BLOCKS * warp;  // the warp's first row in the block

    const fp16* q_head = Q + b_idx * q_stride_b + h_idx * q_stride_h;
    const fp16* k_head = K + b_idx * k_stride_b + kv_h_idx * k_stride_h;
    const fp16* v_head = V + b_idx * v_stride_b + kv_h_idx * v_stride_h;

    QTile{Q_smem}.load_async(q_head, q_stride_s, q_lo, q_len);
    cp_async_commit();  // a group of its own: Q's fragments are read before the first tile has arrived

    const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
    const KvRange range = kv_range(q_lo, q_hi, kv_len);
    const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_begin = (range.full_begin + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_end = range.full_end / BLOCK_KV;
    int tile = range.begin / BLOCK_KV;

    // Copies a tile's keys, or its values, to a stage; zeros if there is no such tile
    const auto load_k = [&](int next, int stage) {
        KTile{K_smem + stage * KTile::ELEMENTS}.load_async(
            k_head, k_stride_s, next * BLOCK_KV, next < tile_end ? kv_len : 0);
    };
    const auto load_v = [&](int next, int stage) {
        VTile{V_smem + stage * VTile::ELEMENTS}.load_async(
            v_head, v_stride_s, next * BLOCK_KV, next < tile_end ? kv_len : 0);
    };

    load_k(tile, 0);
    load_v(tile, 0);
    cp_async_commit();

    // A fragments of Q: lane l points at row l % 16, columns 8 * (l / 16) of each 16 x 16 block
    const fp16* q_fragment = Q_smem + (warp_row + thread_index() % 16) * Q_STRIDE + lane / 16 * 8;
    cp_async_wait<1>();
    __syncthreads();  // Q is complete
    unsigned Q_frag[ROW_BLOCKS][K_STEPS][4];
    for (int m = 0; m < ROW_BLOCKS; ++m)
        for (int step = 0; step < K_STEPS; ++step) ldmatrix_x4(Q_frag[m][step], q_fragment + 16 * m * Q_STRIDE + 16 * step);

    Fragment<DIMS> O_frag = {};
    RowSoftmax softmax;
    for (int r = 0; r < ROWS; ++r) {
        softmax.begin(r);
    }

    int stage = 0;
    while (tile < tile_end) {
        const int kv_lo = tile * BLOCK_KV;
        const bool partial = tile < full_tile_begin || tile >= full_tile_end;
        const int following = tile + 1;
        cp_async_wait<1>();  // this thread's copies of the tile have arrived; after the barrier, all threads' copies
        __syncthreads();  // all threads are done with the previous tile: the next one may replace it
        const fp16* K_tile = K_smem + stage * BLOCK_KV * K_STRIDE;
        const fp16* V_tile = V_smem + stage * BLOCK_KV * V_STRIDE;

        // S = Q K^T
        Fragment<COLUMNS> S_frag = {};
        // B fragments of K^T: of 16 keys x 16 columns, lane l points at key l % 8 + 8 * (l / 16) and columns 8 * (l / 8 % 2)
        const fp16* k_fragment = K_tile + (lane % 8 + lane / 16 * 8) * K_STRIDE + lane / 8 % 2 * 8;
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
            // copies of the next tile, while the tensor cores have the products of the step before
            if (step == 1) load_k(following, stage ^ 1);
            if (step == 2) load_v(following, stage ^ 1);
            if (step == 2) cp_async_commit();
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 8; j += 2) {
                unsigned k_frag[4];
                ldmatrix_x4(k_frag, k_fragment + 8 * j * K_STRIDE + 16 * step);
#pragma unroll
                for (int m = 0; m < ROW_BLOCKS; ++m) {
                    float *upper = &S_frag[2 * m][2 * j], *lower = &S_frag[2 * m + 1][2 * j];
                    mma_16x8x16(upper, lower, Q_frag[m][step], k_frag[0], k_frag[1]);
                    mma_16x8x16(upper + 4, lower + 4, Q_frag[m][step], k_frag[2], k_frag[3]);
                }
            }
        }
        // Rows and columns of S_frag's elements, from the thread's number: kept, they would cost registers
        const int thread = thread_index(), first_column = thread % 4 * 2;
        const auto column_of = [&](int j) { return first_column + j / 2 * 8 + j % 2; };
        const int first_row = thread / 32 * 16 * ROW_BLOCKS + thread % 32 / 4;
        const auto row_of = [&](int r) { return first_row + 8 * r; };
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
        // B fragments of V: lane l points at key l % 16, columns 8 * (l / 16) of 16 keys x 16 columns, read transposed
        const fp16* v_fragment = V_tile + lane % 16 * V_STRIDE + lane / 16 * 8;
#pragma unroll
        for (int step = 0; step < BLOCK_KV / 16; ++step) {
            unsigned p_frag[ROW_BLOCKS][4];
#pragma unroll
            for (int m = 0; m < ROW_BLOCKS; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = &S_frag[2 * m + i % 2][4 * step + i / 2 * 2];
                    p_frag[m][i] = pack(pair[0], pair[1]);
                }
#pragma unroll
            for (int j = 0; j < HEAD_DIM_V / 16 * 2; j += 2) {
                unsigned v_frag[4];
                ldmatrix_x4_trans(v_frag, v_fragment + 16 * step * V_STRIDE + 8 * j);
#pragma unroll
                for (int m = 0; m < ROW_BLOCKS; ++m) {
                    float *upper = &O_frag[2 * m][2 * j], *lower = &O_frag[2 * m + 1][2 * j];
                    mma_16x8x16(upper, lower, p_frag[m], v_frag[0], v_frag[1]);
                    mma_16x8x16(upper + 4, lower + 4, p_frag[m], v_frag[2], v_frag[3]);
                }
            }
        }
        stage ^= 1;
        tile = following;
    }

    // O goes through the warp's own rows of Q_smem: whole rows are then written, 16 bytes a lane
    fp16* O_smem = Q_smem + warp_row * Q_STRIDE;
    cp_async_wait<0>();  // the zeros copied after the last tile
    __syncthreads();  // if no tile was visited, Q is still being read
    const WorkTile end = *work_tile_smem;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float row_sum = quad_sum(softmax.sum[r]);
        const float inverse_sum = row_sum == 0.0f ? 0.0f : fast_reciprocal(row_sum);  // a row with no key gives 0
        fp16* o_row = O_smem + (lane / 4 + 8 * r) * Q_STRIDE + lane % 4 * 2;
        for (int j = 0; j < HEAD_DIM_V / 8; ++j)
            *(unsigned*)(o_row + 8 * j) =
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
        if (row + my_row < rows) *(Chunk*)mine = *(const Chunk*)(O_smem + (row + my_row) * Q_STRIDE + column);
        mine += ROWS_AT_ONCE * o_stride_s;
    }
}
