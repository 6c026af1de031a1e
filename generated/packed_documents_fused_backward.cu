// packed_documents, fused, backward
// =================================
//
//     attention packed_documents {
//         dtype     bf16
//         head_dim  128
//         input     document: int32[batch, kv_len]
//         scale     0.08838834764831845
//         mask      q >= k and document[b, q] == document[b, k]
//     }
//
// For batch b, query head h and query row q, with the key/value head h / group_size:
//
//     s    = 0.08838834764831845 * sum over d of Q[q, d] * K[k, d]
//     S[k] = s where q >= k and document[b, q] == document[b, k], else -inf
//     P[k] = exp(S[k]) / (sum over k of exp(S[k]))
//     dP[k] = (sum over d of dO[q, d] * V[k, d]) where q >= k and document[b, q] == document[b, k], else 0
//     delta = sum over k of P[k] * dP[k]
//     dS[k] = P[k] * (dP[k] - delta)
//     dQ[d] = 0.08838834764831845 * sum over k of dS[k] * K[k, d]
//     and for each key k of a key/value head, over the rows q of the query heads that share it:
//         dK[d] = 0.08838834764831845 * sum over h, q of dS[q, k] * Q[q, d]
//         dV[d] = sum over h, q of P[q, k] * dO[q, d]
//
// Shapes
//     Q    bf16 [batch, q_heads, q_len, 128]
//     K    bf16 [batch, kv_heads, kv_len, 128]
//     V    bf16 [batch, kv_heads, kv_len, 128]
//     document int32 [batch, kv_len]
//     O    bf16 [batch, q_heads, q_len, 128]
//     lse  fp32 [batch, q_heads, q_len]
//     lse_rest fp32 [batch, q_heads, q_len]
//     dO   bf16 [batch, q_heads, q_len, 128]
//     dQ   bf16 [batch, q_heads, q_len, 128], written
//     dK   bf16 [batch, kv_heads, kv_len, 128], written
//     dV   bf16 [batch, kv_heads, kv_len, 128], written
//     delta fp32 [batch, q_heads, q_len], workspace
//     document_qk_min int32 [batch, ceil(kv_len / 64)], workspace
//     document_qk_max int32 [batch, ceil(kv_len / 64)], workspace
//
// Plan, for sm_90a (Hopper: H100, H200)
//     schedule = fused_mma_backward: bf16 on tensor cores (mma.sync, which sm_90a has)
//     gradients = q, k, v: other gradients are not computed
//     dK, dV and dQ = by two kernels: a block has its gradients for itself and adds them up in registers, in a fixed
//         order: no atomics, the same bits in every run; in return S and dP are computed twice
//     weights = recomputed: from scores and the lse of their row, which the forward has saved: O(q_len) bytes
//     lse = lse + lse_rest: one fp32 number cannot hold a large maximum and the logarithm of a sum beside it
//     delta = O and dO: a sum over d: no key is visited
//     BLOCK_Q x BLOCK_KV = 64 x 64: as many rows as keys: ranges of captured vectors serve both kernels; an SM has
//         room for 2 such blocks
//     warps = 4: 16 keys, or rows, each, for which a thread has registers
//     stages = 2: the next tile is copied while one is multiplied
//     PART = 32: columns of S and dP at once: their registers fit beside those of the gradients
//     blocks per SM = 2: this limits the registers of a thread; without the limit, the compiler spills some to make
//         room for more blocks
//     rows in shared memory = padded by 8: the 8 rows that ldmatrix reads lie in different banks
//     heads numbered together = by length: as many key/value heads as fit 32 MiB of L2, 32 to 64
//
// Shared memory of a block, 106016 bytes
//          0  FIXED_QK bf16 [64][128 + 8], the block's keys, or its queries; in the end dK or dQ
//      17408  FIXED_V  bf16 [64][128 + 8], the block's values, in the end dV; or its rows of dO
//      34816  STREAMED_QK bf16 [2][64][128 + 8], a tile of queries, or of keys
//      69632  STREAMED_V bf16 [2][64][128 + 8], a tile of rows of dO, or of values
//     104448  ROW_VALUES float [2][3][64], numbers of a tile's rows, such as lse
//     105984  TILES    unsigned [2][4], a bit for each tile to visit, and for each full one
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. This variant's score and mask
//     4. Which tiles are visited
//     5. Tile ranges of captured vectors
//     6. Loading tiles
//     7. Products
//     8. Delta
//     9. dK and dV
//     10. dQ

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr float softmax_scale = 0.08838834764831845f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int BLOCK_Q = 64;  // query rows of a block
constexpr int BLOCK_KV = 64;  // keys of a tile
constexpr int THREADS = 128;
constexpr int FIXED_QK_SMEM = 0;
constexpr int FIXED_V_SMEM = 17408;
constexpr int STREAMED_QK_SMEM = 34816;
constexpr int STREAMED_V_SMEM = 69632;
constexpr int ROW_VALUES_SMEM = 104448;
constexpr int TILES_SMEM = 105984;
constexpr int BLOCKS = 2;  // that an SM should hold at once: it limits the registers of a thread
constexpr float NOT_A_NUMBER = __builtin_bit_cast(float, 0x7fffffff);
constexpr int BLOCK = 64;  // BLOCK_Q and BLOCK_KV: rows of a tile in shared memory
constexpr int PART = 32;  // columns of S and dP that are multiplied at once
constexpr int ROW_BLOCKS = BLOCK / (16 * 4);  // blocks of 16 rows of a warp
constexpr int PAD = 8;
constexpr int QK_WIDTH = 128;
constexpr int V_WIDTH = 128;
constexpr int QK_STEPS = QK_WIDTH / 16;  // of 16 terms of S
constexpr int V_STEPS = V_WIDTH / 16;  // of dP
constexpr int DELTA_LANES = 8;  // that share a row

// 2. Primitives

// bf16: the upper half of an fp32 (1 sign, 8 exponent, 7 fraction bits).
struct bf16 { unsigned short bits; };

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

// `lse`, or 0 if it is -inf, because the row has no keys: exp(-inf - 0) = 0, not NaN.
__device__ __forceinline__ float finite_or_0(float lse) {
    return lse == -INF ? 0.0f : lse;
}

// Copies 4 bytes from global to shared memory in the background; if `inside` is false it writes zero and reads nothing.
__device__ __forceinline__ void cp_async_4(void* to_smem, const void* from_gmem, bool inside) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(to_smem);
    const int bytes = inside ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from_gmem), "r"(bytes) : "memory");
}

// A mask of the elements of a pair that are infinite or NaN: their exponents are all ones, and adding 1 carries into the sign.
__device__ __forceinline__ unsigned not_finite(unsigned packed) {
    return (((packed & 0x7f807f80) + 0x00800080) >> 15 & 0x00010001) * 0xffff;
}

// A mask of the elements of a pair that are not 0: all ones, added to the bits below the sign, carry into it.
__device__ __forceinline__ unsigned not_zero(unsigned packed) {
    return (((packed & 0x7fff7fff) + 0x7fff7fff) >> 15 & 0x00010001) * 0xffff;
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
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
        : "+f"(upper[0]), "+f"(upper[1]), "+f"(lower[0]), "+f"(lower[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 3. This variant's score and mask

// Params and captured tensors: what the functions below read besides indices and sizes.
// A step is a stride in bytes. It is an int if its index differs between pairs: an address is then one multiply-add.
struct Captured {
    const int* document;  // int32 [batch, kv_len]
    long long document_step_0;
    int document_step_1;
    const int* document_qk_min;  // int32 [batch, tiles of q and k]
    long long document_qk_min_step_0;
    int document_qk_min_step_1;
    const int* document_qk_max;  // int32 [batch, tiles of q and k]
    long long document_qk_max_step_0;
    int document_qk_max_step_1;
};

__device__ __forceinline__ int document_at(const Captured& in, int i0, int i1) {
    const char* at = (const char*)in.document + i0 * in.document_step_0 + (long long)i1 * in.document_step_1;
    return *(const int*)at;
}

__device__ __forceinline__ int document_qk_min_at(const Captured& in, int i0, int i1) {
    const char* at = (const char*)in.document_qk_min
                     + i0 * in.document_qk_min_step_0
                     + (long long)i1 * in.document_qk_min_step_1;
    return *(const int*)at;
}

__device__ __forceinline__ int document_qk_max_at(const Captured& in, int i0, int i1) {
    const char* at = (const char*)in.document_qk_max
                     + i0 * in.document_qk_max_step_0
                     + (long long)i1 * in.document_qk_max_step_1;
    return *(const int*)at;
}

// allowed: q >= k and document[b, q] == document[b, k]
__device__ __forceinline__ bool mask(const Captured& in, int b_idx, int q_idx, int kv_idx) {
    const int t0 = document_at(in, b_idx, q_idx);
    const int t1 = document_at(in, b_idx, kv_idx);
    return q_idx >= kv_idx && t0 == t1;
}

// 4. Which tiles are visited
//
// Indices outside a range are not visited: no pair of theirs is allowed.

struct KvRange {
    int begin, end;  // keys outside are forbidden for every row of the block
};

// The range for rows q_lo to q_hi, solved from q >= k and document[b, q] == document[b, k].
__device__ __forceinline__ KvRange kv_range(int q_hi, int kv_len) {
    return {
        0,  // begin
        min(q_hi + 1, kv_len),  // end
    };
}

struct QRange {
    int begin, end;  // rows outside allow no key of the block
};

// The range for keys kv_lo to kv_hi, solved from q >= k and document[b, q] == document[b, k].
__device__ __forceinline__ QRange q_range(int kv_lo, int q_len) {
    return {
        max(kv_lo, 0),  // begin
        q_len,  // end
    };
}

enum TileKind { EMPTY, PARTIAL, FULL };  // no pair allowed; some; every pair

// The mask in interval arithmetic over a tile: what may hold for some pair, and what must hold for every pair.
__device__ __forceinline__ TileKind classify(
    const Captured& in, int b_idx, int q_lo, int q_hi, int kv_lo, int kv_hi, int q_tile, int kv_tile)
{
    const int t0 = document_qk_min_at(in, b_idx, q_tile);
    const int t1 = document_qk_max_at(in, b_idx, kv_tile);
    const int t2 = document_qk_min_at(in, b_idx, kv_tile);
    const int t3 = document_qk_max_at(in, b_idx, q_tile);
    const bool may = kv_lo <= q_hi && (t0 <= t1 && t2 <= t3);
    const bool must = kv_hi <= q_lo && (t0 == t3 && t2 == t1 && t0 == t2);
    return must ? FULL : may ? PARTIAL : EMPTY;
}

// 5. Tile ranges of captured vectors
//
//     min[tile], max[tile] of the elements of one tile, for every other index
//
// Computed in O(length), before the main kernel, without a mask tensor. One warp finds the range of one tile.

extern "C" __global__ void __launch_bounds__(32)
packed_documents_backward_document_qk_ranges(
    const int* __restrict__ captured_document,  // [batch, kv_len]
    long long captured_document_stride_0, long long captured_document_stride_1,
    int* document_qk_min,  // [batch, ceil(kv_len / 64)]
    int* document_qk_max,  // [batch, ceil(kv_len / 64)]
    long long out_stride_0,
    int batch, int kv_len)
{
    const int tiles = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    int block = blockIdx.x;
    const int tile = block % tiles;
    block /= tiles;
    const int i0 = block;
    const int* vector = captured_document + i0 * captured_document_stride_0;

    int low = 2147483647, high = -2147483647 - 1;
    for (int i = tile * BLOCK_KV + threadIdx.x; i < min((tile + 1) * BLOCK_KV, kv_len); i += 32) {
        const int x = vector[i * captured_document_stride_1];
        low = x < low ? x : low;
        high = x > high ? x : high;
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const int other_low = __shfl_xor_sync(0xffffffff, low, lanes);
        const int other_high = __shfl_xor_sync(0xffffffff, high, lanes);
        low = other_low < low ? other_low : low;
        high = other_high > high ? other_high : high;
    }
    if (threadIdx.x == 0) {
        document_qk_min[i0 * out_stride_0 + tile] = low;
        document_qk_max[i0 * out_stride_0 + tile] = high;
    }
}

// 6. Loading tiles
//
// A tile in shared memory is rows of bf16, each followed by PAD elements that are not used: the eight rows that an ldmatrix
// reads at once then start in different banks, since a row is an odd number of 16-byte chunks.

// A tile of TILE_ROWS rows in shared memory, STRIDE elements from row to row: COLUMNS elements of data, zeros up to WIDTH.
template <int TILE_ROWS, int COLUMNS, int WIDTH, int STRIDE> struct PaddedTile {
    static constexpr int ELEMENTS = TILE_ROWS * STRIDE;
    static constexpr int CHUNKS = WIDTH / 8;  // 16 bytes of a row each
    static constexpr int STEP = THREADS / CHUNKS;  // rows that the block copies at once
    static_assert(CHUNKS <= THREADS, "each chunk of a row has a thread");
    bf16* smem;

    // Copies the rows of `matrix` from `first` on in the background; all threads call it. Rows from `end` on arrive as zeros. A
    // thread copies 16 bytes of every STEP-th row, always of the same columns.
    __device__ __forceinline__ void load_async(const bf16* matrix, long long row_stride, int first, int end) const {
        const int thread = thread_index();  // read again at each call: row and column would cost registers between calls
        const int row = thread / CHUNKS, column = thread % CHUNKS * 8;
        if (row >= STEP) return;  // threads beyond STEP rows; the branch also keeps ptxas from moving copies between products
        const bf16* from = matrix + (first + row) * row_stride + column;
        bf16* to = smem + row * STRIDE + column;
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r += STEP) {
            const bool inside = first + row + r < end && column < COLUMNS;
            if (TILE_ROWS % STEP == 0 || r + row < TILE_ROWS) cp_async_16(to + r * STRIDE, from, inside);
            from += STEP * row_stride;
        }
    }
};
using QKTile = PaddedTile<BLOCK, HEAD_DIM, QK_WIDTH, QK_WIDTH + PAD>;  // a tile of Q or K
using VTile = PaddedTile<BLOCK, HEAD_DIM_V, V_WIDTH, V_WIDTH + PAD>;  // a tile of V or dO

// Numbers of which each row of a tile has one, in shared memory.
struct RowValues {
    float lse[BLOCK_Q];
    float lse_rest[BLOCK_Q];
    float delta[BLOCK_Q];
};

// 7. Products
//
// Each warp multiplies 16 * ROW_BLOCKS rows of a block, in fragments of the tensor cores.
// Fragments of S and O: of the 16 rows of a product, lane l holds rows l / 4 and l / 4 + 8; of every 8 columns, columns
// 2 * (l % 4) and the next. The four lanes with the same l / 4 share a row.
//
//     multiply_rows       S = Q K^T and dP = dO V^T, or their transposes
//     multiply_fragments  what is added up over tiles: dV += P^T dO, dK += dS^T Q, dQ += dS K
//     multiply_stored     the same of P and dS from shared memory, where other warps stored them

struct alignas(16) Chunk {  // 16 bytes, which a lane loads or stores at once
    unsigned words[4];
};

// D += A B^T: rows of A times rows of B, both in shared memory, WIDTH columns of each. A begins at the warp's own rows.
template <int WIDTH, int STEPS, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_rows(float (&D)[ROWS][COLUMNS], const bf16* A, const bf16* B) {
    constexpr int STRIDE = WIDTH + PAD;
    // A fragments: lane l points at row l % 16, columns 8 * (l / 16) of each 16 x 16 block
    // B fragments: of 16 rows x 16 columns, lane l points at row l % 8 + 8 * (l / 16) and columns 8 * (l / 8 % 2)
    const int lane = thread_index() % 32;
    const bf16* a_fragment = A + lane % 16 * STRIDE + lane / 16 * 8;
    const bf16* b_fragment = B + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        unsigned a_frag[ROWS / 2][4];
#pragma unroll
        for (int m = 0; m < ROWS / 2; ++m) ldmatrix_x4(a_frag[m], a_fragment + 16 * m * STRIDE + 16 * step);
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; j += 2) {
            unsigned b_frag[4];
            ldmatrix_x4(b_frag, b_fragment + 8 * j * STRIDE + 16 * step);
#pragma unroll
            for (int m = 0; m < ROWS / 2; ++m) {
                float *upper = &D[2 * m][2 * j], *lower = &D[2 * m + 1][2 * j];
                mma_16x8x16(upper, lower, a_frag[m], b_frag[0], b_frag[1]);
                mma_16x8x16(upper + 2, lower + 2, a_frag[m], b_frag[2], b_frag[3]);
            }
        }
    }
}

// The left factors of a sum: the fragments of an earlier product, rounded to bf16. The D fragment of two neighbouring blocks
// of 8 columns is an A fragment: no lane needs another's numbers.
template <int ROWS, int SUMMED> struct Factors {
    unsigned frag[SUMMED / 4][ROWS / 2][4];

    __device__ __forceinline__ Factors() {}
    __device__ __forceinline__ explicit Factors(const float (&A)[ROWS][SUMMED]) {
#pragma unroll
        for (int step = 0; step < SUMMED / 4; ++step)
#pragma unroll
            for (int m = 0; m < ROWS / 2; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = &A[2 * m + i % 2][4 * step + i / 2 * 2];
                    frag[step][m][i] = pack(pair[0], pair[1]);
                }
    }
};

// D += A B for the elements of B that are not finite: NaN where one of them is multiplied by a factor that is not 0.
template <int WIDTH, int ROWS, int COLUMNS, int SUMMED>
__device__ __forceinline__ void add_not_finite(
    float (&D)[ROWS][COLUMNS], const Factors<ROWS, SUMMED>& A, const bf16* b_fragment)
{
#pragma unroll
    for (int j = 0; j < COLUMNS / 2; j += 2)
#pragma unroll
        for (int m = 0; m < ROWS / 2; ++m) {
            float upper[4] = {}, lower[4] = {};
#pragma unroll
            for (int step = 0; step < SUMMED / 4; ++step) {
                unsigned a_frag[4], b_frag[4];
                ldmatrix_x4_trans(b_frag, b_fragment + 16 * step * (WIDTH + PAD) + 8 * j);
                for (int i = 0; i < 4; ++i) {
                    a_frag[i] = not_zero(A.frag[step][m][i]) & pack(1.0f, 1.0f);
                    b_frag[i] = not_finite(b_frag[i]) & pack(1.0f, 1.0f);
                }
                mma_16x8x16(upper, lower, a_frag, b_frag[0], b_frag[1]);
                mma_16x8x16(upper + 2, lower + 2, a_frag, b_frag[2], b_frag[3]);
            }
            for (int i = 0; i < 4; ++i) {
                if (upper[i] > 0.0f) D[2 * m][2 * j + i] = NOT_A_NUMBER;
                if (lower[i] > 0.0f) D[2 * m + 1][2 * j + i] = NOT_A_NUMBER;
            }
        }
}

// D += A B. B is in shared memory: a row of WIDTH columns for each column of A; `B` points at the first column of D. With
// SKIPS, a term whose factor in A is 0 counts as 0 whatever is in B: elements of B that are not finite are left out, and added
// afterwards.
template <int WIDTH, bool SKIPS, int ROWS, int COLUMNS, int SUMMED>
__device__ __forceinline__ void multiply_fragments(
    float (&D)[ROWS][COLUMNS], const Factors<ROWS, SUMMED>& A, const bf16* B)
{
    constexpr int STRIDE = WIDTH + PAD;
    // B fragments: lane l points at row l % 16, columns 8 * (l / 16) of 16 rows x 16 columns, read transposed
    const int lane = thread_index() % 32;
    const bf16* b_fragment = B + lane % 16 * STRIDE + lane / 16 * 8;
    unsigned left_out = 0;
#pragma unroll
    for (int step = 0; step < SUMMED / 4; ++step)
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; j += 2) {
            unsigned b_frag[4];
            ldmatrix_x4_trans(b_frag, b_fragment + 16 * step * STRIDE + 8 * j);
            if (SKIPS)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const unsigned special = not_finite(b_frag[i]);
                    left_out |= special;
                    b_frag[i] &= ~special;
                }
#pragma unroll
            for (int m = 0; m < ROWS / 2; ++m) {
                float *upper = &D[2 * m][2 * j], *lower = &D[2 * m + 1][2 * j];
                mma_16x8x16(upper, lower, A.frag[step][m], b_frag[0], b_frag[1]);
                mma_16x8x16(upper + 2, lower + 2, A.frag[step][m], b_frag[2], b_frag[3]);
            }
        }
    if (SKIPS && __any_sync(0xffffffff, left_out != 0)) add_not_finite<WIDTH>(D, A, b_fragment);
}

// Stores factor * D in its place of a tile of WIDTH columns in shared memory.
template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_fragments(bf16* rows, const float (&D)[ROWS][COLUMNS], float factor) {
    const int lane = thread_index() % 32;
    bf16* mine = rows + lane / 4 * (WIDTH + PAD) + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; ++j)
            *(unsigned*)(mine + 8 * r * (WIDTH + PAD) + 8 * j) = pack(D[r][2 * j] * factor, D[r][2 * j + 1] * factor);
}

// Stores the first `rows` and `columns` of a warp's part of a gradient, 8 elements of 16 bytes a lane, from rows of WIDTH
// columns in shared memory, of which COLUMNS are the warp's, to global memory.
template <int COLUMNS, int WIDTH>
__device__ __forceinline__ void store_rows(
    bf16* to, long long row_stride, const bf16* part_smem, int rows, int columns = COLUMNS)
{
    constexpr int CHUNKS = COLUMNS / 8;
#pragma unroll 1
    for (int i = thread_index() % 32; i < 16 * ROW_BLOCKS * CHUNKS; i += 32) {
        const int row = i / CHUNKS, column = i % CHUNKS * 8;
        if (row < rows && column < columns)
            *(Chunk*)(to + row * row_stride + column) = *(const Chunk*)(part_smem + row * (WIDTH + PAD) + column);
    }
}

// 8. Delta
//
//     delta[q] = sum over d of dO[q, d] * O[q, d]
//
// which is sum over k of P[k] * dP[k], in O(head_dim) instead of O(kv_len). DELTA_LANES lanes share a row.

extern "C" __global__ void __launch_bounds__(THREADS)
packed_documents_backward_delta(
    const bf16* __restrict__ O,  // [batch, q_heads, q_len, 128]
    const bf16* __restrict__ dO,  // [batch, q_heads, q_len, 128]
    float* delta,  // [batch, q_heads, q_len]
    long long o_stride_b, long long o_stride_h, long long o_stride_s,
    long long do_stride_b, long long do_stride_h, long long do_stride_s,
    int q_heads, int q_len)
{
    const int row_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    const int h_idx = blockIdx.x / row_blocks % q_heads, b_idx = blockIdx.x / row_blocks / q_heads;
    const int q_lo = blockIdx.x % row_blocks * BLOCK_Q;
#pragma unroll
    for (int row = threadIdx.x / DELTA_LANES; row < BLOCK_Q; row += THREADS / DELTA_LANES) {
        const int q_idx = q_lo + row, existing = min(q_idx, q_len - 1);  // all lanes take part in the shuffles below
        const bf16* o_row = O + b_idx * o_stride_b + h_idx * o_stride_h + existing * o_stride_s;
        const bf16* do_row = dO + b_idx * do_stride_b + h_idx * do_stride_h + existing * do_stride_s;
        float sum = 0.0f;
        for (int column = threadIdx.x % DELTA_LANES * 8; column < HEAD_DIM_V; column += 8 * DELTA_LANES) {
            const Chunk o = *(const Chunk*)(o_row + column), grad = *(const Chunk*)(do_row + column);
            for (int i = 0; i < 4; ++i)
                sum += low_of(o.words[i]) * low_of(grad.words[i]) + high_of(o.words[i]) * high_of(grad.words[i]);
        }
        for (int lanes = DELTA_LANES / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
        if (threadIdx.x % DELTA_LANES == 0 && q_idx < q_len)
            delta[((long long)b_idx * q_heads + h_idx) * q_len + q_idx] = sum;
    }
}

// The keys that a block owns. Blocks of one head are neighbours and read the same rows. The first keys of a head come first:
// under a causal mask they have the most rows.
struct KeyBlock {
    int kv_block, kv_h_idx, b_idx;
};
__device__ __forceinline__ KeyBlock key_block_of(int block, int kv_heads, int kv_len) {
    const int kv_blocks = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    return {block % kv_blocks, block / kv_blocks % kv_heads, block / kv_blocks / kv_heads};
}

// 9. dK and dV
//
//     P  = exp(S - lse)  with S = s   where q >= k and document[b, q] == document[b, k], else 0
//     dS = P * (dO V^T - delta)   where q >= k and document[b, q] == document[b, k], else 0
//     dV = sum over query heads of P^T dO
//     dK = softmax_scale * sum over query heads of dS^T Q
//
// A block owns BLOCK_KV keys of a key/value head, each warp its share of them, and visits the rows of all query heads that
// share the head, always in the same order: nothing is added up in global memory, and every run has the same bits. The scores
// are computed transposed, a row of fragments for a key: P^T and dS^T are A operands as they are.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
packed_documents_backward_dk_dv(
    const bf16* __restrict__ Q,  // [batch, q_heads, q_len, 128]
    const bf16* __restrict__ K,  // [batch, kv_heads, kv_len, 128]
    const bf16* __restrict__ V,  // [batch, kv_heads, kv_len, 128]
    const bf16* __restrict__ dO,  // [batch, q_heads, q_len, 128]
    const float* __restrict__ lse,  // [batch, q_heads, q_len]
    const float* __restrict__ lse_rest,  // [batch, q_heads, q_len]
    const float* __restrict__ delta,  // [batch, q_heads, q_len]
    bf16* dK,  // [batch, kv_heads, kv_len, 128]
    bf16* dV,  // [batch, kv_heads, kv_len, 128]
    long long q_stride_b, long long q_stride_h, long long q_stride_s,
    long long k_stride_b, long long k_stride_h, long long k_stride_s,
    long long v_stride_b, long long v_stride_h, long long v_stride_s,
    long long do_stride_b, long long do_stride_h, long long do_stride_s,
    long long dk_stride_b, long long dk_stride_h, long long dk_stride_s,
    long long dv_stride_b, long long dv_stride_h, long long dv_stride_s,
    long long lse_stride_b, long long lse_stride_h, long long lse_stride_s,
    long long lse_rest_stride_b, long long lse_rest_stride_h, long long lse_rest_stride_s,
    int q_heads, int kv_heads, int q_len, int kv_len,
    const int* __restrict__ captured_document,  // [batch, kv_len]
    long long captured_document_step_0, int captured_document_step_1,
    const int* __restrict__ captured_document_qk_min,  // [batch, ceil(kv_len / 64)]
    long long captured_document_qk_min_step_0, int captured_document_qk_min_step_1,
    const int* __restrict__ captured_document_qk_max,  // [batch, ceil(kv_len / 64)]
    long long captured_document_qk_max_step_0, int captured_document_qk_max_step_1)
{
    constexpr int ROWS = 2 * ROW_BLOCKS, COLUMNS = PART / 4;  // a thread's keys, and its rows that are multiplied at once
    extern __shared__ __align__(16) unsigned char smem[];
    bf16* K_smem = (bf16*)(smem + FIXED_QK_SMEM);  // [BLOCK_KV][QK_WIDTH + PAD]
    bf16* V_smem = (bf16*)(smem + FIXED_V_SMEM);  // [BLOCK_KV][V_WIDTH + PAD]
    bf16* Q_smem = (bf16*)(smem + STREAMED_QK_SMEM);  // [2][BLOCK_Q][QK_WIDTH + PAD]
    bf16* dO_smem = (bf16*)(smem + STREAMED_V_SMEM);  // [2][BLOCK_Q][V_WIDTH + PAD]
    RowValues* row_values = (RowValues*)(smem + ROW_VALUES_SMEM);  // [2]

    const KeyBlock key_block = key_block_of(blockIdx.x, kv_heads, kv_len);
    const int kv_block = key_block.kv_block, kv_h_idx = key_block.kv_h_idx, b_idx = key_block.b_idx;
    const int kv_lo = kv_block * BLOCK_KV, group_size = q_heads / kv_heads;
    const int warp_key = 16 * ROW_BLOCKS * (thread_index() / 32);  // the warp's first key in the block
    QKTile{K_smem}.load_async(K + b_idx * k_stride_b + kv_h_idx * k_stride_h, k_stride_s, kv_lo, kv_len);
    VTile{V_smem}.load_async(V + b_idx * v_stride_b + kv_h_idx * v_stride_h, v_stride_s, kv_lo, kv_len);

    float dK_frag[ROWS][QK_WIDTH / 4] = {};
    float dV_frag[ROWS][V_WIDTH / 4] = {};
    int stage = 0;
    for (int h_idx = kv_h_idx * group_size; h_idx < (kv_h_idx + 1) * group_size; ++h_idx) {
        const Captured in = {
            captured_document, captured_document_step_0, captured_document_step_1, captured_document_qk_min,
            captured_document_qk_min_step_0, captured_document_qk_min_step_1, captured_document_qk_max,
            captured_document_qk_max_step_0, captured_document_qk_max_step_1
        };

        const int kv_hi = min(kv_lo + BLOCK_KV, kv_len) - 1;
        const int kv_tile = kv_block;
        const QRange range = q_range(kv_lo, q_len);
        const int tile_begin = range.begin / BLOCK_Q;
        const int tile_end = (range.end + BLOCK_Q - 1) / BLOCK_Q;
        const int whole_tiles = q_len / BLOCK_Q;  // a tile that reaches past the last row is never full
        const auto kind = [&](int tile) {
            const int q_lo = tile * BLOCK_Q;
            const int q_hi = min((tile + 1) * BLOCK_Q, q_len) - 1;
            return classify(in, b_idx, q_lo, q_hi, kv_lo, kv_hi, tile, kv_tile);
        };
        // The threads classify THREADS tiles at once, one each, and store a bit for each tile that is not empty, and for each
        // full tile, 32 tiles a word
        unsigned* const visited = (unsigned*)(smem + TILES_SMEM);  // [THREADS / 32]
        unsigned* const full = visited + THREADS / 32;  // [THREADS / 32]
        // The first tile from `begin` on that is not empty; tile_end if there is none
        const auto tile_from = [&](int begin) {
            while (begin < tile_end) {
                if (begin % THREADS == 0) {
                    __syncthreads();  // all threads have read the words of the previous tiles
                    const int mine = begin + threadIdx.x;
                    const TileKind its_kind = mine >= tile_begin && mine < tile_end ? kind(mine) : EMPTY;
                    const unsigned visited_here = __ballot_sync(0xffffffff, its_kind != EMPTY);
                    const unsigned full_here = __ballot_sync(0xffffffff, its_kind == FULL && mine < whole_tiles);
                    if (threadIdx.x % 32 == 0) {
                        visited[threadIdx.x / 32] = visited_here;
                        full[threadIdx.x / 32] = full_here;
                    }
                    __syncthreads();  // the words of these tiles are complete
                }
                const unsigned later = visited[begin % THREADS / 32] >> begin % 32;
                if (later != 0) return begin + __ffs(later) - 1;
                begin = (begin / 32 + 1) * 32;
            }
            return tile_end;
        };
        int tile = tile_from(tile_begin / THREADS * THREADS);

        const auto load_rows = [&](int next, int to) {
            const int q_lo = next * BLOCK_Q, b = opaque(b_idx), h = opaque(h_idx);  // no address is kept in registers
            QKTile{Q_smem + to * QKTile::ELEMENTS}.load_async(
                Q + b * q_stride_b + h * q_stride_h, q_stride_s, q_lo, q_len);
            VTile{dO_smem + to * VTile::ELEMENTS}.load_async(
                dO + b * do_stride_b + h * do_stride_h, do_stride_s, q_lo, q_len);
            const int row = thread_index(), q_idx = q_lo + row;
            if (row < BLOCK_Q) {
                RowValues& values = row_values[to];
                const float* lse_head = lse + b * lse_stride_b + h * lse_stride_h;
                cp_async_4(values.lse + row, lse_head + q_idx * lse_stride_s, q_idx < q_len);
                const float* lse_rest_head = lse_rest + b * lse_rest_stride_b + h * lse_rest_stride_h;
                cp_async_4(values.lse_rest + row, lse_rest_head + q_idx * lse_rest_stride_s, q_idx < q_len);
                const float* delta_head = delta + ((long long)b * q_heads + h) * q_len;
                cp_async_4(values.delta + row, delta_head + q_idx, q_idx < q_len);
            }
        };
        if (tile < tile_end) load_rows(tile, stage);
        cp_async_commit();

        while (tile < tile_end) {
            const bool partial = (full[tile % THREADS / 32] >> tile % 32 & 1) == 0;
            const int following = tile_from(tile + 1);
            cp_async_wait<0>();  // this thread's copies of the tile have arrived; after the barrier, all threads' copies
            if (thread_index() < BLOCK_Q) {  // this thread has copied the row
                float& row_lse = row_values[stage].lse[thread_index()];
                row_lse = finite_or_0(row_lse);
            }
            __syncthreads();  // and all threads are done with the previous tile: the next one may replace it
            if (following < tile_end) load_rows(following, stage ^ 1);
            cp_async_commit();
#pragma unroll 1
            for (int part = 0; part < BLOCK_Q; part += PART) {
                const int q_lo = tile * BLOCK_Q + part;
                const bf16* Q_tile = Q_smem + stage * QKTile::ELEMENTS + part * (QK_WIDTH + PAD);
                const bf16* dO_tile = dO_smem + stage * VTile::ELEMENTS + part * (V_WIDTH + PAD);
                const RowValues& of_rows = row_values[stage];

                // S^T = K Q^T, dP^T = V dO^T
                float S_frag[ROWS][COLUMNS] = {};
                multiply_rows<QK_WIDTH, QK_STEPS>(S_frag, K_smem + warp_key * (QK_WIDTH + PAD), Q_tile);
                float dP_frag[ROWS][COLUMNS] = {};
                multiply_rows<V_WIDTH, V_STEPS>(dP_frag, V_smem + warp_key * (V_WIDTH + PAD), dO_tile);

                // Rows and columns of the fragments' elements, from the thread's number: kept, they would cost registers
                const int thread = thread_index(), first_column = thread % 4 * 2, first_row = warp_key + thread % 32 / 4;
                const auto column_of = [&](int j) { return first_column + j / 2 * 8 + j % 2; };
                const auto row_of = [&](int r) { return first_row + 8 * r; };
                // P takes the place of S, dS that of dP
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        const int row = part + column_of(j);  // the row in the tile
                        const float s = S_frag[r][j] * softmax_scale;
                        const float P = fast_exp2((s - of_rows.lse[row]) * LOG2_E - of_rows.lse_rest[row] * LOG2_E);
                        const float dS = P * (dP_frag[r][j] - of_rows.delta[row]);
                        dP_frag[r][j] = dS;
                        S_frag[r][j] = P;
                    }
                // Pairs that the mask excludes are set to 0, not multiplied by it: what was computed for them may be NaN
                if (partial) {
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int j = 0; j < COLUMNS; ++j) {
                            const int q_idx = min(q_lo + column_of(j), q_len - 1);
                            const int kv_idx = kv_lo + row_of(r);
                            const bool allowed = mask(in, b_idx, q_idx, min(kv_idx, kv_len - 1));
                            if (q_lo + column_of(j) >= q_len || !allowed) S_frag[r][j] = dP_frag[r][j] = 0.0f;
                        }
                }

                const Factors<ROWS, COLUMNS> P_factors(S_frag);
                const Factors<ROWS, COLUMNS> dS_factors(dP_frag);
                // dV += P^T dO
                if (partial)
                    multiply_fragments<V_WIDTH, true>(dV_frag, P_factors, dO_tile);
                else
                    multiply_fragments<V_WIDTH, false>(dV_frag, P_factors, dO_tile);
                // dK += dS^T Q
                if (partial)
                    multiply_fragments<QK_WIDTH, true>(dK_frag, dS_factors, Q_tile);
                else
                    multiply_fragments<QK_WIDTH, false>(dK_frag, dS_factors, Q_tile);
            }
            stage ^= 1;
            tile = following;
        }
    }

    // The sums go through the warp's own rows of shared memory: whole rows are then written, 16 bytes a lane
    cp_async_wait<0>();
    __syncthreads();  // if no tile was visited, the keys may not have arrived
    const KeyBlock end = key_block_of(opaque(blockIdx.x), kv_heads, kv_len);  // recomputed: kept, it would cost registers
    const int first_key = end.kv_block * BLOCK_KV + warp_key, existing = kv_len - first_key;
    bf16* dK_smem = K_smem + warp_key * (QK_WIDTH + PAD);
    store_fragments<QK_WIDTH>(dK_smem, dK_frag, softmax_scale);
    bf16* dV_smem = V_smem + warp_key * (V_WIDTH + PAD);
    store_fragments<V_WIDTH>(dV_smem, dV_frag, 1.0f);
    __syncwarp();
    bf16* dk_rows =
        dK + end.b_idx * dk_stride_b + end.kv_h_idx * dk_stride_h + first_key * dk_stride_s;
    store_rows<HEAD_DIM, QK_WIDTH>(dk_rows, dk_stride_s, dK_smem, existing);
    bf16* dv_rows =
        dV + end.b_idx * dv_stride_b + end.kv_h_idx * dv_stride_h + first_key * dv_stride_s;
    store_rows<HEAD_DIM_V, V_WIDTH>(dv_rows, dv_stride_s, dV_smem, existing);
}

// 10. dQ
//
//     P  = exp(S - lse)  with S = s   where q >= k and document[b, q] == document[b, k], else 0
//     dS = P * (dO V^T - delta)   where q >= k and document[b, q] == document[b, k], else 0
//     dQ = softmax_scale * dS K
//
// A block owns BLOCK_Q rows, each warp its share of them, and visits tiles of keys as the forward does.
//
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
packed_documents_backward_dq(
    const bf16* __restrict__ Q,  // [batch, q_heads, q_len, 128]
    const bf16* __restrict__ K,  // [batch, kv_heads, kv_len, 128]
    const bf16* __restrict__ V,  // [batch, kv_heads, kv_len, 128]
    const bf16* __restrict__ dO,  // [batch, q_heads, q_len, 128]
    const float* __restrict__ lse,  // [batch, q_heads, q_len]
    const float* __restrict__ lse_rest,  // [batch, q_heads, q_len]
    const float* __restrict__ delta,  // [batch, q_heads, q_len]
    bf16* dQ,  // [batch, q_heads, q_len, 128]
    long long q_stride_b, long long q_stride_h, long long q_stride_s,
    long long k_stride_b, long long k_stride_h, long long k_stride_s,
    long long v_stride_b, long long v_stride_h, long long v_stride_s,
    long long do_stride_b, long long do_stride_h, long long do_stride_s,
    long long dq_stride_b, long long dq_stride_h, long long dq_stride_s,
    long long lse_stride_b, long long lse_stride_h, long long lse_stride_s,
    long long lse_rest_stride_b, long long lse_rest_stride_h, long long lse_rest_stride_s,
    int q_heads, int kv_heads, int q_len, int kv_len,
    int heads_in_l2,  // query heads whose blocks are numbered together
    const int* __restrict__ captured_document,  // [batch, kv_len]
    long long captured_document_step_0, int captured_document_step_1,
    const int* __restrict__ captured_document_qk_min,  // [batch, ceil(kv_len / 64)]
    long long captured_document_qk_min_step_0, int captured_document_qk_min_step_1,
    const int* __restrict__ captured_document_qk_max,  // [batch, ceil(kv_len / 64)]
    long long captured_document_qk_max_step_0, int captured_document_qk_max_step_1)
{
    constexpr int ROWS = 2 * ROW_BLOCKS, COLUMNS = PART / 4;  // a thread's rows, and its keys that are multiplied at once
    extern __shared__ __align__(16) unsigned char smem[];
    bf16* Q_smem = (bf16*)(smem + FIXED_QK_SMEM);  // [BLOCK_Q][QK_WIDTH + PAD]
    bf16* dO_smem = (bf16*)(smem + FIXED_V_SMEM);  // [BLOCK_Q][V_WIDTH + PAD]
    bf16* K_smem = (bf16*)(smem + STREAMED_QK_SMEM);  // [2][BLOCK_KV][QK_WIDTH + PAD]
    bf16* V_smem = (bf16*)(smem + STREAMED_V_SMEM);  // [2][BLOCK_KV][V_WIDTH + PAD]

    const WorkTile work_tile = work_tile_of(blockIdx.x, gridDim.x, q_heads, q_len, heads_in_l2);
    const int q_block = work_tile.q_block, h_idx = work_tile.h_idx, b_idx = work_tile.b_idx;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int q_lo = q_block * BLOCK_Q;
    const int warp_row = 16 * ROW_BLOCKS * (thread_index() / 32);  // the warp's first row in the block
    const Captured in = {
        captured_document, captured_document_step_0, captured_document_step_1, captured_document_qk_min,
        captured_document_qk_min_step_0, captured_document_qk_min_step_1, captured_document_qk_max,
        captured_document_qk_max_step_0, captured_document_qk_max_step_1
    };

    QKTile{Q_smem}.load_async(Q + b_idx * q_stride_b + h_idx * q_stride_h, q_stride_s, q_lo, q_len);
    VTile{dO_smem}.load_async(dO + b_idx * do_stride_b + h_idx * do_stride_h, do_stride_s, q_lo, q_len);

    const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
    const int q_tile = q_block;
    const KvRange range = kv_range(q_hi, kv_len);
    const int tile_begin = range.begin / BLOCK_KV;
    const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
    const int whole_tiles = kv_len / BLOCK_KV;  // a tile that reaches past the last key is never full
    const auto kind = [&](int tile) {
        const int kv_lo = tile * BLOCK_KV;
        const int kv_hi = min((tile + 1) * BLOCK_KV, kv_len) - 1;
        return classify(in, b_idx, q_lo, q_hi, kv_lo, kv_hi, q_tile, tile);
    };
    // The threads classify THREADS tiles at once, one each, and store a bit for each tile that is not empty, and for each
    // full tile, 32 tiles a word
    unsigned* const visited = (unsigned*)(smem + TILES_SMEM);  // [THREADS / 32]
    unsigned* const full = visited + THREADS / 32;  // [THREADS / 32]
    // The first tile from `begin` on that is not empty; tile_end if there is none
    const auto tile_from = [&](int begin) {
        while (begin < tile_end) {
            if (begin % THREADS == 0) {
                __syncthreads();  // all threads have read the words of the previous tiles
                const int mine = begin + threadIdx.x;
                const TileKind its_kind = mine >= tile_begin && mine < tile_end ? kind(mine) : EMPTY;
                const unsigned visited_here = __ballot_sync(0xffffffff, its_kind != EMPTY);
                const unsigned full_here = __ballot_sync(0xffffffff, its_kind == FULL && mine < whole_tiles);
                if (threadIdx.x % 32 == 0) {
                    visited[threadIdx.x / 32] = visited_here;
                    full[threadIdx.x / 32] = full_here;
                }
                __syncthreads();  // the words of these tiles are complete
            }
            const unsigned later = visited[begin % THREADS / 32] >> begin % 32;
            if (later != 0) return begin + __ffs(later) - 1;
            begin = (begin / 32 + 1) * 32;
        }
        return tile_end;
    };
    int tile = tile_from(tile_begin / THREADS * THREADS);

    const auto load_keys = [&](int next, int to) {
        const int kv_lo = next * BLOCK_KV, b = opaque(b_idx), h = opaque(kv_h_idx);  // no address is kept in registers
        QKTile{K_smem + to * QKTile::ELEMENTS}.load_async(
            K + b * k_stride_b + h * k_stride_h, k_stride_s, kv_lo, kv_len);
        VTile{V_smem + to * VTile::ELEMENTS}.load_async(
            V + b * v_stride_b + h * v_stride_h, v_stride_s, kv_lo, kv_len);
    };
    int stage = 0;
    if (tile < tile_end) load_keys(tile, stage);
    cp_async_commit();

    float lse_of[ROWS], lse_rest_of[ROWS], delta_of[ROWS];  // values of this lane's rows
    for (int r = 0; r < ROWS; ++r) {
        const int q_idx = min(q_lo + warp_row + (int)thread_index() % 32 / 4 + 8 * r, q_len - 1);
        lse_of[r] = finite_or_0(lse[b_idx * lse_stride_b + h_idx * lse_stride_h + q_idx * lse_stride_s]);
        lse_rest_of[r] = lse_rest[b_idx * lse_rest_stride_b + h_idx * lse_rest_stride_h + q_idx * lse_rest_stride_s];
        delta_of[r] = delta[((long long)b_idx * q_heads + h_idx) * q_len + q_idx];
    }
    float dQ_frag[ROWS][QK_WIDTH / 4] = {};
    while (tile < tile_end) {
        const bool partial = (full[tile % THREADS / 32] >> tile % 32 & 1) == 0;
        const int following = tile_from(tile + 1);
        cp_async_wait<0>();  // this thread's copies of the tile have arrived; after the barrier, all threads' copies
        __syncthreads();  // and all threads are done with the previous tile: the next one may replace it
        if (following < tile_end) load_keys(following, stage ^ 1);
        cp_async_commit();
#pragma unroll 1
        for (int part = 0; part < BLOCK_KV; part += PART) {
            const int kv_lo = tile * BLOCK_KV + part;
            const bf16* K_tile = K_smem + stage * QKTile::ELEMENTS + part * (QK_WIDTH + PAD);
            const bf16* V_tile = V_smem + stage * VTile::ELEMENTS + part * (V_WIDTH + PAD);

            // S = Q K^T, dP = dO V^T
            float S_frag[ROWS][COLUMNS] = {}, dP_frag[ROWS][COLUMNS] = {};
            multiply_rows<QK_WIDTH, QK_STEPS>(S_frag, Q_smem + warp_row * (QK_WIDTH + PAD), K_tile);
            multiply_rows<V_WIDTH, V_STEPS>(dP_frag, dO_smem + warp_row * (V_WIDTH + PAD), V_tile);

            // Rows and columns of the fragments' elements, from the thread's number: kept, they would cost registers
            const int thread = thread_index(), first_column = thread % 4 * 2, first_row = warp_row + thread % 32 / 4;
            const auto column_of = [&](int j) { return first_column + j / 2 * 8 + j % 2; };
            const auto row_of = [&](int r) { return first_row + 8 * r; };
            // dS takes the place of dP
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    const float s = S_frag[r][j] * softmax_scale;
                    const float P = fast_exp2((s - lse_of[r]) * LOG2_E - lse_rest_of[r] * LOG2_E);
                    const float dS = P * (dP_frag[r][j] - delta_of[r]);
                    dP_frag[r][j] = dS;
                }
            // Pairs that the mask excludes are set to 0, not multiplied by it: what was computed for them may be NaN
            if (partial) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j) {
                        const int q_idx = min(q_lo + row_of(r), q_len - 1);
                        const int kv_idx = kv_lo + column_of(j);
                        const bool allowed = mask(in, b_idx, q_idx, min(kv_idx, kv_len - 1));
                        if (kv_idx >= kv_len || !allowed) dP_frag[r][j] = 0.0f;
                    }
            }

            const Factors<ROWS, COLUMNS> dS_factors(dP_frag);
            // dQ += dS K
            if (partial)
                multiply_fragments<QK_WIDTH, true>(dQ_frag, dS_factors, K_tile);
            else
                multiply_fragments<QK_WIDTH, false>(dQ_frag, dS_factors, K_tile);
        }
        stage ^= 1;
        tile = following;
    }

    // dQ goes through the warp's own rows of Q_smem: whole rows are then written, 16 bytes a lane
    cp_async_wait<0>();
    __syncthreads();  // if no tile was visited, Q may not have arrived
    bf16* dQ_smem = Q_smem + warp_row * (QK_WIDTH + PAD);
    store_fragments<QK_WIDTH>(dQ_smem, dQ_frag, softmax_scale);
    __syncwarp();
    const WorkTile end = work_tile_of(opaque(blockIdx.x), gridDim.x, q_heads, q_len, heads_in_l2);  // recomputed
    const int first_row = end.q_block * BLOCK_Q + warp_row;
    bf16* dq_rows = dQ + end.b_idx * dq_stride_b + end.h_idx * dq_stride_h + first_row * dq_stride_s;
    store_rows<HEAD_DIM, QK_WIDTH>(dq_rows, dq_stride_s, dQ_smem, q_len - first_row);
}
