// gpt2, decode
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
//     split_O fp32 [batch, q_heads, q_len, splits, 64], workspace
//     split_max fp32 [batch, q_heads, q_len, splits], workspace
//     split_sum fp32 [batch, q_heads, q_len, splits], workspace
//
// Plan, for sm_80 (Ampere: A100)
//     schedule = decode: fp16 on tensor cores (mma.sync, which sm_80 has), for few rows and many keys
//     auto takes it = for calls of at most 16 query rows and at least 256 keys: other schedules would have few
//         blocks, because a block has the rows of one head; each block would read all keys, and each query head
//         would read them again
//     rows = those of all heads that share keys: keys are read once for all of them; a product has 16 rows even if
//         there are fewer
//     BLOCK_Q x BLOCK_KV = 16 x 32: the rows of one product, and the keys of a warp
//     blocks per SM = 1: more blocks would read memory in smaller pieces, which is slower
//     splits = by sizes and multiprocessors: as many as keep all multiprocessors reading keys until the end
//     warps = 4: each has its own keys, stages and sums: no warp waits for another before the end
//     stages = 3: while a tile is used, copies of 72 KiB are under way on each SM
//     Q = in registers: its fragments take 16 registers a thread
//     partial results = O before division by l, with m and l: as exact as without splits; an lse instead of m and l
//         would lose the last bits of l if m is large
//     rows in shared memory = padded by 8: the 8 rows that ldmatrix reads lie in different banks
//
// Shared memory of a block, 113408 bytes
//          0  Q        fp16 [16][64 + 8], the block's rows
//       2304  K        fp16 [4][3][32][64 + 8], the keys of 3 tiles of each warp
//      57600  V        fp16 [4][3][32][64 + 8], the values of 3 tiles of each warp
//     112896  MAX      float [4][16], the maximum of each warp's keys
//     113152  SUM      float [4][16], the sum of their weights
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
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;
constexpr float softmax_scale = 0.125f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float EXPONENT_SCALE = softmax_scale * LOG2_E;  // exp(softmax_scale x) = 2^(EXPONENT_SCALE x)
constexpr int BLOCK_Q = 16;  // rows of a block, of the query heads that share keys
constexpr int BLOCK_KV = 32;  // keys of a tile, which a warp multiplies
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int STAGES = 3;  // tiles of a warp in shared memory
constexpr int Q_SMEM = 0;
constexpr int K_SMEM = 2304;
constexpr int V_SMEM = 57600;
constexpr int MAX_SMEM = 112896;
constexpr int SUM_SMEM = 113152;
constexpr float RESCALE_THRESHOLD = 8.0f;  // an exponent may exceed that of the maximum in use by this much: a factor of 2^8
constexpr float LARGE = 65536.0f;  // above this magnitude, fp32 rounds maximum * EXPONENT_SCALE too coarsely
constexpr int BLOCKS = 1;  // that an SM should hold at once: it limits the registers of a thread
constexpr int ROW_THREADS = 8;  // the block's threads as a grid over a tile: its rows
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
constexpr int O_STRIDE = HEAD_DIM_V + 8;  // of sums of O, in the memory of K and V
constexpr int QUADS = HEAD_DIM_V / 4;  // of neighbouring columns of O
constexpr int JOINING = 128;  // threads of a block that joins splits

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

// threadIdx.x, read again at each call: what was computed from an earlier call need not stay in a register.
__device__ __forceinline__ unsigned thread_index() {
    unsigned index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
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

// As cp_async_16, for memory that is read once from end to end: L2 reads 256 bytes at a time.
__device__ __forceinline__ void cp_async_stream_16(void* to_smem, const void* from_gmem, bool inside) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(to_smem);
    const int bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from_gmem), "r"(bytes) : "memory");
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

// `x` of WIDTH neighbouring lanes combined, known to all of them.
template <int WIDTH, typename Combine> __device__ __forceinline__ float lane_reduce(float x, Combine combine) {
    for (int lanes = WIDTH / 2; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, lanes));
    return x;
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

// BLOCK_KV keys or values of a warp, STRIDE elements from row to row: COLUMNS elements of data, zeros up to WIDTH.
template <int COLUMNS, int WIDTH, int STRIDE> struct WarpTile {
    static constexpr int ELEMENTS = BLOCK_KV * STRIDE;
    static constexpr int CHUNKS = WIDTH / 8;  // 16 bytes of a row each
    fp16* smem;

    // Copies the rows of `matrix` from `first` on in the background; all lanes of the warp call it. Rows from `end` on arrive
    // as zeros.
    __device__ __forceinline__ void load_async(const fp16* matrix, long long row_stride, int first, int end) const {
        const int lane = thread_index() % 32;
#pragma unroll
        for (int i = 0; i < BLOCK_KV * CHUNKS; i += 32) {
            const int row = (i + lane) / CHUNKS, column = (i + lane) % CHUNKS * 8;
            const bool inside = first + row < end && column < COLUMNS;
            const fp16* from = matrix + (first + row) * row_stride + column;
            if (BLOCK_KV * CHUNKS % 32 == 0 || row < BLOCK_KV) cp_async_stream_16(smem + row * STRIDE + column, from, inside);
        }
    }
};
using KTile = WarpTile<HEAD_DIM, QK_WIDTH, K_STRIDE>;
using VTile = WarpTile<HEAD_DIM_V, HEAD_DIM_V, V_STRIDE>;

// 6. The keys of a split
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
// A block computes this for the keys of one split. A warp visits every (splits * WARPS)-th tile of keys.
// The block writes O before the division by l, m and l.
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gpt2_split(
    const fp16* __restrict__ Q,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ K,  // [batch, kv_heads, kv_len, 64]
    const fp16* __restrict__ V,  // [batch, kv_heads, kv_len, 64]
    fp16* O,  // [batch, q_heads, q_len, 64]
    float* split_O,  // [batch, q_heads, q_len, splits, 64]
    float* split_max,  // [batch, q_heads, q_len, splits]
    float* split_sum,  // [batch, q_heads, q_len, splits]
    long long q_stride_b, long long q_stride_h, long long q_stride_s,
    long long k_stride_b, long long k_stride_h, long long k_stride_s,
    long long v_stride_b, long long v_stride_h, long long v_stride_s,
    long long o_stride_b, long long o_stride_h, long long o_stride_s,
    int q_heads, int kv_heads, int q_len, int kv_len,
    int splits)  // blocks over which the keys of a tile of rows are split
{
    extern __shared__ __align__(16) unsigned char smem[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    fp16* Q_smem = (fp16*)(smem + Q_SMEM);  // [BLOCK_Q][Q_STRIDE]
    fp16* K_warp = (fp16*)(smem + K_SMEM) + warp * STAGES * KTile::ELEMENTS;  // [STAGES][BLOCK_KV][K_STRIDE]
    fp16* V_warp = (fp16*)(smem + V_SMEM) + warp * STAGES * VTile::ELEMENTS;  // [STAGES][BLOCK_KV][V_STRIDE]

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
    const int block_rows = min((unsigned)BLOCK_Q, rows - first_row);
    const auto part_of = [&](int r) {  // where the partial result of a row of the block is written
        const unsigned row = first_row + r;
        const int head = first_head + row % group_size;
        return (((long long)b_idx * q_heads + head) * q_len + row / group_size) * splits + split;
    };

    const int q_lo = first_row / group_size;
    const int q_hi = (first_row + block_rows - 1) / group_size;
    const KvRange range = kv_range(q_lo, q_hi, kv_len);
    const int tile_begin = range.begin / BLOCK_KV, tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;

    const int first_tile = tile_begin + split * WARPS + warp, tile_step = splits * WARPS;  // the warp's tiles
    if (splits > 1 && tile_begin + split * WARPS >= tile_end) {  // the split has no key
        if ((int)threadIdx.x < block_rows) split_max[part_of(threadIdx.x)] = -INF;
        return;
    }
    const int full_tile_begin = (range.full_begin + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_end = range.full_end / BLOCK_KV;
    const fp16* k_head = K + b_idx * k_stride_b + kv_h_idx * k_stride_h;
    const fp16* v_head = V + b_idx * v_stride_b + kv_h_idx * v_stride_h;

    const fp16* q_first = Q + b_idx * q_stride_b + first_head * q_stride_h;
    for (int i = threadIdx.x; i < BLOCK_Q * (QK_WIDTH / 8); i += THREADS) {
        const int r = i / (QK_WIDTH / 8), column = i % (QK_WIDTH / 8) * 8;
        const unsigned row = first_row + r;
        const fp16* from = q_first + row % group_size * q_stride_h + row / group_size * q_stride_s + column;
        cp_async_16(Q_smem + r * Q_STRIDE + column, from, r < block_rows && column < HEAD_DIM);
    }
    cp_async_commit();
    int next = first_tile;
    // Copies the warp's next tile to a stage. Each call closes a group, an empty one if no tile is left, because waits count
    // groups
    const auto copy_next = [&](int stage) {
        if (next < tile_end) {
            KTile{K_warp + stage * KTile::ELEMENTS}.load_async(k_head, k_stride_s, next * BLOCK_KV, kv_len);
            VTile{V_warp + stage * VTile::ELEMENTS}.load_async(v_head, v_stride_s, next * BLOCK_KV, kv_len);
        }
        cp_async_commit();
        next += tile_step;
    };

    for (int i = 0; i < STAGES - 1; ++i) copy_next(i);

    cp_async_wait<STAGES - 1>();
    __syncthreads();  // Q is complete
    // A fragments of Q: lane l points at row l % 16, columns 8 * (l / 16) of each 16 x 16 block
    const fp16* q_fragment = Q_smem + lane % 16 * Q_STRIDE + lane / 16 * 8;
    unsigned Q_frag[ROW_BLOCKS][K_STEPS][4];
    for (int m = 0; m < ROW_BLOCKS; ++m)
        for (int step = 0; step < K_STEPS; ++step) ldmatrix_x4(Q_frag[m][step], q_fragment + 16 * m * Q_STRIDE + 16 * step);
    // The indices of a thread's rows; those past the last one are read as the last
    int q_idx_of[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        const unsigned row = first_row + min(lane / 4 + 8 * r, block_rows - 1);
        q_idx_of[r] = row / group_size;
    }

    Fragment<DIMS> O_frag = {};
    RowSoftmax softmax;
    for (int r = 0; r < ROWS; ++r) {
        softmax.begin(r);
    }

    int stage = 0;
    for (int tile = first_tile; tile < tile_end; tile += tile_step) {
        cp_async_wait<STAGES - 2>();  // this lane's copies of the tile have arrived
        __syncwarp();  // all lanes' copies have arrived, and all lanes are done with the previous stage
        copy_next(stage == 0 ? STAGES - 1 : stage - 1);
        const int kv_lo = tile * BLOCK_KV;
        const bool partial = tile < full_tile_begin || tile >= full_tile_end;
        const fp16* K_tile = K_warp + stage * KTile::ELEMENTS;
        const fp16* V_tile = V_warp + stage * VTile::ELEMENTS;

        // S = Q K^T
        Fragment<COLUMNS> S_frag = {};
        // B fragments of K^T: of 16 keys x 16 columns, lane l points at key l % 8 + 8 * (l / 16) and columns 8 * (l / 8 % 2)
        const fp16* k_fragment = K_tile + (lane % 8 + lane / 16 * 8) * K_STRIDE + lane / 8 % 2 * 8;
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
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
        if (++stage == STAGES) stage = 0;
    }

    // Joins the results of the warps, which they write over K and V
    __syncthreads();  // all warps are done with their tiles
    float* O_smem = (float*)(smem + K_SMEM);  // [WARPS][BLOCK_Q][O_STRIDE]
    float* max_smem = (float*)(smem + MAX_SMEM);  // [WARPS][BLOCK_Q]
    float* sum_smem = (float*)(smem + SUM_SMEM);  // [WARPS][BLOCK_Q]
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = warp * BLOCK_Q + lane / 4 + 8 * r;
        float* o_row = O_smem + row * O_STRIDE + lane % 4 * 2;
        for (int j = 0; j < HEAD_DIM_V / 8; ++j) {
            o_row[8 * j] = O_frag[r][2 * j];
            o_row[8 * j + 1] = O_frag[r][2 * j + 1];
        }
        const float row_sum = quad_sum(softmax.sum[r]);
        if (lane % 4 == 0) {
            max_smem[row] = softmax.max[r];
            sum_smem[row] = row_sum;
        }
    }
    for (int i = threadIdx.x; i < block_rows * QUADS; i += THREADS) {
        const int row = i / QUADS, column = i % QUADS * 4;
        Quad sum = {};
        float row_max = -INF, row_sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) row_max = fmaxf(row_max, max_smem[w * BLOCK_Q + row]);
        const float shift = row_max == -INF ? 0.0f : row_max;
        for (int w = 0; w < WARPS; ++w) {
            const Quad of_warp = *(const Quad*)(O_smem + (w * BLOCK_Q + row) * O_STRIDE + column);
            const float weight = fast_exp2((max_smem[w * BLOCK_Q + row] - shift) * EXPONENT_SCALE);
            row_sum += weight * sum_smem[w * BLOCK_Q + row];
            for (int e = 0; e < 4; ++e) sum.at[e] += weight * of_warp.at[e];
        }
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
        fp16* o_row = O + b_idx * o_stride_b + h_idx * o_stride_h + q_idx * o_stride_s;
        ((unsigned*)(o_row + column))[0] = pack(sum.at[0], sum.at[1]);
        ((unsigned*)(o_row + column))[1] = pack(sum.at[2], sum.at[3]);
    }
}

// 7. The join of all splits
//
//     m = max over splits i of m_i,  O = sum of exp(m_i - m) O_i / sum of exp(m_i - m) l_i
//
// A block computes a row: thread i has columns 4 * (i % QUADS) to + 3 of every GROUPS-th split.

extern "C" __global__ void __launch_bounds__(JOINING)
gpt2_join(
    const float* __restrict__ split_O,  // [batch, q_heads, q_len, splits, 64]
    const float* __restrict__ split_max,  // [batch, q_heads, q_len, splits]
    const float* __restrict__ split_sum,  // [batch, q_heads, q_len, splits]
    fp16* O,  // [batch, q_heads, q_len, 64]
    long long o_stride_b, long long o_stride_h, long long o_stride_s,
    int q_heads, int kv_heads, int q_len,
    int splits)  // blocks over which the keys of a tile of rows are split
{
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
        fp16* o_row = O + b_idx * o_stride_b + h_idx * o_stride_h + q_idx * o_stride_s;
        ((unsigned*)(o_row + column))[0] = pack(sum.at[0], sum.at[1]);
        ((unsigned*)(o_row + column))[1] = pack(sum.at[2], sum.at[3]);
    }
}
