// llama_rotary, fused, backward
// =============================
//
//     attention llama_rotary {
//         dtype     bf16
//         head_dim  128
//         heads     32 over 8
//         input     cosines: fp32[positions, 64]
//         input     sines: fp32[positions, 64]
//         scale     0.08838834764831845
//         mask      q >= k
//         rotary    128 halves by cosines, sines
//     }
//
// For batch b, query head h and query row q, with the key/value head h / group_size:
//
//     Q, K = rows rotated by their positions: rotary 128 halves by cosines, sines
//     s    = 0.08838834764831845 * sum over d of Q[q, d] * K[k, d]
//     S[k] = s where q >= k, else -inf
//     P[k] = exp(S[k]) / (sum over k of exp(S[k]))
//     dP[k] = (sum over d of dO[q, d] * V[k, d]) where q >= k, else 0
//     delta = sum over k of P[k] * dP[k]
//     dS[k] = P[k] * (dP[k] - delta)
//     dQ[d] = 0.08838834764831845 * sum over k of dS[k] * K[k, d]
//     and for each key k of a key/value head, over the rows q of the query heads that share it:
//         dK[d] = 0.08838834764831845 * sum over h, q of dS[q, k] * Q[q, d]
//         dV[d] = sum over h, q of P[q, k] * dO[q, d]
//     and rows of dQ and dK are turned back by the angles of Q and K
//
// Shapes
//     Q    bf16 [batch, 32, q_len, 128]
//     K    bf16 [batch, 8, kv_len, 128]
//     V    bf16 [batch, 8, kv_len, 128]
//     cosines fp32 [positions, 64]
//     sines fp32 [positions, 64]
//     Q_rotated bf16 [batch, 32, q_len, 128], workspace
//     K_rotated bf16 [batch, 8, kv_len, 128], workspace
//     O    bf16 [batch, 32, q_len, 128]
//     lse  fp32 [batch, 32, q_len]
//     lse_rest fp32 [batch, 32, q_len]
//     dO   bf16 [batch, 32, q_len, 128]
//     dQ   bf16 [batch, 32, q_len, 128], written
//     dK   bf16 [batch, 8, kv_len, 128], written
//     dV   bf16 [batch, 8, kv_len, 128], written
//     delta fp32 [batch, 32, q_len], workspace
//     dq_sums fp32 [batch, 32, ceil(q_len / 64), 32, 256, 1], workspace
//
// Plan, for sm_80 (Ampere: A100)
//     schedule = fused_mma_backward: bf16 on tensor cores (mma.sync, which sm_80 has)
//     gradients = q, k, v: other gradients are not computed
//     dQ = additions: blocks that hold keys add their parts to fp32 sums in global memory: S and dP are computed
//         once, five products
//     deterministic = dK and dV alone: blocks add to dQ in the order in which they happen to arrive
//     weights = recomputed: from scores and the lse of their row, which the forward has saved: O(q_len) bytes
//     lse = lse + lse_rest: one fp32 number cannot hold a large maximum and the logarithm of a sum beside it
//     delta = O and dO: a sum over d: no key is visited
//     BLOCK_Q x BLOCK_KV = 64 x 128: many keys: less is added to dQ; an SM has room for 1 such block
//     warps = 8: 32 keys each, and a fragment of a tile serves two products
//     warps that share keys = 2: 256 sums a thread would spill: each has a share of the rows of S and dP, and of the
//         columns of dK and dV
//     warp's part of dQ = 32 x 32: of a tile: dS of all keys is in shared memory
//     stages = 1: two do not fit shared memory
//     PART = 32: columns of S and dP at once: their registers fit beside those of the gradients
//     blocks per SM = 1: this limits the registers of a thread; without the limit, the compiler spills some to make
//         room for more blocks
//     rows in shared memory = padded by 8: the 8 rows that ldmatrix reads lie in different banks
//     heads numbered together = by length: as many key/value heads as fit 32 MiB of L2, 32 to 64
//     rotary = by a kernel before the others: it reads and writes rows of Q and K once; those of K would be rotated
//         again for each block of rows
//
// Shared memory of a block, 142080 bytes
//          0  K        bf16 [128][128 + 8], the block's keys, in the end dK
//      34816  V        bf16 [128][128 + 8], the block's values, in the end dV
//      69632  Q        bf16 [1][64][128 + 8], a tile of queries
//      87040  DO       bf16 [1][64][128 + 8], a tile of rows of dO
//     104448  P        bf16 [128][64 + 8], P^T of a tile, for the other warps of the same keys
//     122880  DS       bf16 [128][64 + 8], dS^T of a tile, for all warps
//     141312  ROW_VALUES float [1][3][64], numbers of a tile's rows, such as lse
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. This variant's score and mask
//     4. Rotary embeddings
//     5. Which tiles are visited
//     6. Loading tiles
//     7. Products
//     8. Delta
//     9. dK, dV and additions to dQ
//     10. dQ from its sums

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int q_heads = 32;
constexpr int kv_heads = 8;
constexpr float softmax_scale = 0.08838834764831845f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int BLOCK_Q = 64;  // query rows of a block
constexpr int BLOCK_KV = 128;  // keys of a tile
constexpr int THREADS = 256;
constexpr int K_SMEM = 0;
constexpr int V_SMEM = 34816;
constexpr int Q_SMEM = 69632;
constexpr int DO_SMEM = 87040;
constexpr int P_SMEM = 104448;
constexpr int DS_SMEM = 122880;
constexpr int ROW_VALUES_SMEM = 141312;
constexpr int BLOCKS = 1;  // that an SM should hold at once: it limits the registers of a thread
constexpr float NOT_A_NUMBER = __builtin_bit_cast(float, 0x7fffffff);
constexpr int PART = 32;  // columns of S and dP that are multiplied at once
constexpr int ROW_BLOCKS = 2;  // blocks of 16 rows of a warp
constexpr int PAD = 8;
constexpr int QK_WIDTH = 128;
constexpr int V_WIDTH = 128;
constexpr int SHARES = 2;  // warps that have the same keys: each its share of a tile's rows, and of the columns of dK and dV
constexpr int WARP_KEYS = 16 * ROW_BLOCKS;
constexpr int OWN_ROWS = BLOCK_Q / SHARES;  // of a tile, whose S and dP a warp computes
constexpr int QK_COLUMNS = QK_WIDTH / SHARES;  // of dK, of a warp
constexpr int V_COLUMNS = V_WIDTH / SHARES;  // of dV, of a warp
constexpr int QK_STEPS = (HEAD_DIM + 15) / 16;  // of 16 terms of S: columns of zeros are left out
constexpr int V_STEPS = (HEAD_DIM_V + 15) / 16;  // of dP
constexpr int TILE_WIDTH = BLOCK_Q + PAD;  // of a row of P^T or dS^T in shared memory
constexpr int DQ_ROWS = 32;  // of dQ of a tile, of a warp
constexpr int DQ_COLUMNS = 32;
constexpr int DQ_CHUNKS = 1;  // of so many columns, which a warp multiplies one after another
constexpr int DQ_CHUNK = BLOCK_Q * QK_WIDTH / DQ_CHUNKS;  // sums of all warps
constexpr int DELTA_LANES = 8;  // that share a row

// 2. Primitives

// bf16: the upper half of an fp32 (1 sign, 8 exponent, 7 fraction bits).
struct bf16 { unsigned short bits; };

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

// Rounded to nearest, ties to even; a NaN stays a NaN.
__device__ __forceinline__ bf16 to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    const unsigned rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const unsigned quiet_nan = (bits >> 16) | 0x40;
    return bf16{(unsigned short)(x != x ? quiet_nan : rounded)};
}

__device__ __forceinline__ float to_float(float x) { return x; }

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

// Adds a number to one in global memory. Any number of threads may add to the same place; the order of their additions is not
// fixed, and so neither are the last bits of the sum.
__device__ __forceinline__ void global_add_one(float* to, float a) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(a) : "memory");
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

// allowed: q >= k
__device__ __forceinline__ bool mask(int q_idx, int kv_idx) {
    return q_idx >= kv_idx;
}

// 4. Rotary embeddings
//
//     128 halves by cosines, sines
//
// The first kernel writes rotated rows of Q and K, rounded to their type, which all others read in their place.
// The last one turns the gradients back, in place: a rotation's transpose is the rotation by the opposite angle.

constexpr int CHUNK = 8;  // elements of 16 bytes
constexpr int HALF = 64;  // pairs of elements that are rotated
constexpr int ROTATED = HALF / CHUNK;  // parts of a row that are rotated
constexpr int PARTS = ROTATED + (HEAD_DIM - 2 * HALF) / CHUNK;  // of a row of Q or K
constexpr int ROTARY_THREADS = 128;  // of a block, which has a row of all heads

struct alignas(16) RowPart {  // neighbouring elements of a row
    bf16 at[CHUNK];
};

// Copies a part of a row. In the first ROTATED parts a pair (x, y), elements i and i + HALF, becomes
// (x cos - y sin, x sin + y cos), by the cosines and sines of the row's position.
// `turn` is 1, or -1 to turn a pair back.
__device__ __forceinline__ void move_rotated(
    const bf16* from, bf16* to, int part, const float* cosines, const float* sines, float turn) {
    if (part >= ROTATED) {
        const int column = 2 * HALF + (part - ROTATED) * CHUNK;
        *(RowPart*)(to + column) = *(const RowPart*)(from + column);
        return;
    }
    const int column = part * CHUNK;
    RowPart first = *(const RowPart*)(from + column), second = *(const RowPart*)(from + HALF + column);
    for (int i = 0; i < CHUNK; ++i) {
        const float x = to_float(first.at[i]), y = to_float(second.at[i]);
        const float c = to_float(cosines[column + i]), s = turn * to_float(sines[column + i]);
        first.at[i] = to_bf16(x * c - y * s);
        second.at[i] = to_bf16(x * s + y * c);
    }
    *(RowPart*)(to + column) = first;
    *(RowPart*)(to + HALF + column) = second;
}

// the position of a row
__device__ __forceinline__ int q_position(int q_idx, int q_len, int kv_len) {
    return q_idx + kv_len - q_len;
}

// the position of a key
__device__ __forceinline__ int k_position(int kv_idx) {
    return kv_idx;
}

// The row of a table at a position, or the nearest one.
__device__ __forceinline__ long long nearest(long long position, int length) {
    return position < 0 ? 0 : position < length ? position : length - 1;
}

extern "C" __global__ void __launch_bounds__(ROTARY_THREADS)
llama_rotary_backward_rotate(
    const bf16* __restrict__ Q,  // [batch, 32, q_len, 128]
    bf16* Q_rotated,  // [batch, 32, q_len, 128]
    const bf16* __restrict__ K,  // [batch, 8, kv_len, 128]
    bf16* K_rotated,  // [batch, 8, kv_len, 128]
    const float* __restrict__ cosines,  // [positions, 64]
    const float* __restrict__ sines,  // [positions, 64]
    long long cosines_stride_p,
    long long sines_stride_p,
    int cosines_len, int sines_len,
    long long q_stride_b, long long q_stride_h, long long q_stride_s,
    long long q_rotated_stride_b, long long q_rotated_stride_h, long long q_rotated_stride_s,
    long long k_stride_b, long long k_stride_h, long long k_stride_s,
    long long k_rotated_stride_b, long long k_rotated_stride_h, long long k_rotated_stride_s,
    int q_len, int kv_len)
{
    const int rows = q_len + kv_len, b_idx = blockIdx.x / rows;
    int row = blockIdx.x % rows;

    const auto rotate_row = [&](const bf16* from, long long from_stride_h, bf16* to, long long to_stride_h, int heads,
                              long long position) {
        const float* c = cosines + nearest(position, cosines_len) * cosines_stride_p;
        const float* s = sines + nearest(position, sines_len) * sines_stride_p;
        for (int i = threadIdx.x; i < heads * PARTS; i += ROTARY_THREADS) {
            const int h_idx = i / PARTS;
            move_rotated(from + h_idx * from_stride_h, to + h_idx * to_stride_h, i % PARTS, c, s, 1.0f);
        }
    };
    if (row < q_len) {  // a row of Q
        const int q_idx = row;
        rotate_row(Q + b_idx * q_stride_b + q_idx * q_stride_s, q_stride_h,
                 Q_rotated + b_idx * q_rotated_stride_b + q_idx * q_rotated_stride_s, q_rotated_stride_h, q_heads,
                 q_position(q_idx, q_len, kv_len));
        return;
    }
    row -= q_len;
    if (row < kv_len) {  // a row of K
        const int kv_idx = row;
        rotate_row(K + b_idx * k_stride_b + kv_idx * k_stride_s, k_stride_h,
                 K_rotated + b_idx * k_rotated_stride_b + kv_idx * k_rotated_stride_s, k_rotated_stride_h, kv_heads,
                 k_position(kv_idx));
        return;
    }
}

extern "C" __global__ void __launch_bounds__(ROTARY_THREADS)
llama_rotary_backward_turn_back(
    bf16* dQ,  // [batch, 32, q_len, 128]
    bf16* dK,  // [batch, 8, kv_len, 128]
    const float* __restrict__ cosines,  // [positions, 64]
    const float* __restrict__ sines,  // [positions, 64]
    long long cosines_stride_p,
    long long sines_stride_p,
    int cosines_len, int sines_len,
    long long dq_stride_b, long long dq_stride_h, long long dq_stride_s,
    long long dk_stride_b, long long dk_stride_h, long long dk_stride_s,
    int q_len, int kv_len)
{
    const int rows = q_len + kv_len, b_idx = blockIdx.x / rows;
    int row = blockIdx.x % rows;

    const auto rotate_row = [&](const bf16* from, long long from_stride_h, bf16* to, long long to_stride_h, int heads,
                              long long position) {
        const float* c = cosines + nearest(position, cosines_len) * cosines_stride_p;
        const float* s = sines + nearest(position, sines_len) * sines_stride_p;
        for (int i = threadIdx.x; i < heads * PARTS; i += ROTARY_THREADS) {
            const int h_idx = i / PARTS;
            move_rotated(from + h_idx * from_stride_h, to + h_idx * to_stride_h, i % PARTS, c, s, -1.0f);
        }
    };
    if (row < q_len) {  // a row of dQ
        const int q_idx = row;
        rotate_row(dQ + b_idx * dq_stride_b + q_idx * dq_stride_s, dq_stride_h,
                 dQ + b_idx * dq_stride_b + q_idx * dq_stride_s, dq_stride_h, q_heads,
                 q_position(q_idx, q_len, kv_len));
        return;
    }
    row -= q_len;
    if (row < kv_len) {  // a row of dK
        const int kv_idx = row;
        rotate_row(dK + b_idx * dk_stride_b + kv_idx * dk_stride_s, dk_stride_h,
                 dK + b_idx * dk_stride_b + kv_idx * dk_stride_s, dk_stride_h, kv_heads,
                 k_position(kv_idx));
        return;
    }
}

// 5. Which tiles are visited
//
// Indices outside a range are not visited: no pair of theirs is allowed.

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
using QTile = PaddedTile<BLOCK_Q, HEAD_DIM, QK_WIDTH, QK_WIDTH + PAD>;
using DoTile = PaddedTile<BLOCK_Q, HEAD_DIM_V, V_WIDTH, V_WIDTH + PAD>;
using KTile = PaddedTile<BLOCK_KV, HEAD_DIM, QK_WIDTH, QK_WIDTH + PAD>;
using VTile = PaddedTile<BLOCK_KV, HEAD_DIM_V, V_WIDTH, V_WIDTH + PAD>;

// Numbers of which each row of a tile has one, in shared memory.
struct RowValues {
    float lse[BLOCK_Q];
    float lse_rest[BLOCK_Q];
    float delta[BLOCK_Q];
};

// 7. Products
//
// A warp multiplies fragments of the tensor cores, for 16 * ROW_BLOCKS keys.
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

// Stores P^T or dS^T of a warp's pairs at `place` in a tile of TILE_WIDTH columns in shared memory.
template <int ROWS, int SUMMED> __device__ __forceinline__ void store_factors(bf16* place, const Factors<ROWS, SUMMED>& A) {
    const int lane = thread_index() % 32;
    bf16* mine = place + lane / 4 * TILE_WIDTH + lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < SUMMED / 4; ++step)
#pragma unroll
        for (int m = 0; m < ROWS / 2; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                *(unsigned*)(mine + (16 * m + i % 2 * 8) * TILE_WIDTH + 16 * step + i / 2 * 8) = A.frag[step][m][i];
}

// D += A B, as multiply_fragments: SUMMED columns of A, in a tile of TILE_WIDTH columns in shared memory that has A, or its
// transpose.
template <int WIDTH, bool SKIPS, int SUMMED, bool TRANSPOSED, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_stored(float (&D)[ROWS][COLUMNS], const bf16* A, const bf16* B) {
    // A fragments: lane l points at row l % 16 and columns 8 * (l / 16) of 16 x 16; of the transpose, at row
    // l % 8 + 8 * (l / 16) and columns 8 * (l / 8 % 2)
    const int lane = thread_index() % 32;
    const bf16* a_fragment = A + (TRANSPOSED ? (lane % 8 + lane / 16 * 8) * TILE_WIDTH + lane / 8 % 2 * 8
                                        : lane % 16 * TILE_WIDTH + lane / 16 * 8);
#pragma unroll(SKIPS ? 1 : SUMMED / 16)
    for (int step = 0; step < SUMMED / 16; ++step) {
        Factors<ROWS, 4> factors;
#pragma unroll
        for (int m = 0; m < ROWS / 2; ++m)
            if (TRANSPOSED)
                ldmatrix_x4_trans(factors.frag[0][m], a_fragment + 16 * step * TILE_WIDTH + 16 * m);
            else
                ldmatrix_x4(factors.frag[0][m], a_fragment + 16 * m * TILE_WIDTH + 16 * step);
        multiply_fragments<WIDTH, SKIPS>(D, factors, B + 16 * step * (WIDTH + PAD));
    }
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
llama_rotary_backward_delta(
    const bf16* __restrict__ O,  // [batch, 32, q_len, 128]
    const bf16* __restrict__ dO,  // [batch, 32, q_len, 128]
    float* delta,  // [batch, 32, q_len]
    float* dq_sums,  // [batch, 32, ceil(q_len / 64), 32, 256, 1]
    long long o_stride_b, long long o_stride_h, long long o_stride_s,
    long long do_stride_b, long long do_stride_h, long long do_stride_s,
    int q_len)
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

    // The sums of dQ begin at 0
    float* const sums = dq_sums + (long long)blockIdx.x * (BLOCK_Q * QK_WIDTH);
#pragma unroll
    for (int i = 4 * threadIdx.x; i < BLOCK_Q * QK_WIDTH; i += 4 * THREADS) *(Chunk*)(sums + i) = {};
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

// 9. dK, dV and additions to dQ
//
//     P  = exp(S - lse)  with S = s   where q >= k, else 0
//     dS = P * (dO V^T - delta)   where q >= k, else 0
//     dV = sum over query heads of P^T dO
//     dK = softmax_scale * sum over query heads of dS^T Q
//     dQ = softmax_scale * sum over keys of dS K
//
// A block owns BLOCK_KV keys of a key/value head, and visits the rows of all query heads that share the head. The scores are
// computed transposed, a row of fragments for a key: P^T and dS^T are A operands as they are.
//
// WARP_KEYS keys belong to SHARES warps: a thread has no registers for all of their dK and dV. Each of these warps computes S, dP
// and with them P and dS for OWN_ROWS rows of a tile, and adds up its columns of dK and dV over all rows: P and dS of the other
// warps come through shared memory.
//
// dQ of a tile is a sum over the keys of all blocks. A warp multiplies DQ_ROWS x DQ_COLUMNS of a tile, with dS of all keys of the
// block, and adds them to fp32 sums in global memory: in the order in which blocks happen to arrive.

// The part of dQ of a tile that this warp multiplies.
struct DqPart {
    int row, column;
};
__device__ __forceinline__ DqPart dq_part() {
    constexpr int COLUMNS = DQ_COLUMNS * DQ_CHUNKS, SIDE_BY_SIDE = QK_WIDTH / COLUMNS;
    const int warp = thread_index() / 32;
    return {warp / SIDE_BY_SIDE * DQ_ROWS, warp % SIDE_BY_SIDE * COLUMNS};
}

// The first of this warp's keys, and which share of their rows and columns it has. Read again at each use: kept, it would cost
// registers.
struct Place {
    int key, share;
};
__device__ __forceinline__ Place warp_place() {
    const int warp = thread_index() / 32;
    return {warp / SHARES * WARP_KEYS, warp % SHARES};
}

// Where this thread's first numbers are in the sums of a tile of rows of a head. They lie as in its registers, not in rows: those
// that one instruction of a warp adds are neighbours.
__device__ __forceinline__ long long first_sum(int longest, int head, int tile) {
    const int q_tiles = (longest + BLOCK_Q - 1) / BLOCK_Q;
    return ((long long)head * q_tiles + tile) * (BLOCK_Q * QK_WIDTH) + thread_index();
}

// Adds part `part` of PARTS of the registers of dQ to `sums`.
template <int PARTS>
__device__ __forceinline__ void add_dq(float* sums, const float (&dQ)[DQ_ROWS / 8][DQ_COLUMNS / 4], int part) {
    constexpr int COUNT = DQ_ROWS / 8 * (DQ_COLUMNS / 4);
#pragma unroll
    for (int i = 0; i < COUNT; i += 1) {
        const float* mine = &dQ[i / (DQ_COLUMNS / 4)][i % (DQ_COLUMNS / 4)];
        if (i * PARTS / COUNT == part) global_add_one(sums + i * THREADS, *mine);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
llama_rotary_backward_dk_dv(
    const bf16* __restrict__ Q,  // [batch, 32, q_len, 128]
    const bf16* __restrict__ K,  // [batch, 8, kv_len, 128]
    const bf16* __restrict__ V,  // [batch, 8, kv_len, 128]
    const bf16* __restrict__ dO,  // [batch, 32, q_len, 128]
    const float* __restrict__ lse,  // [batch, 32, q_len]
    const float* __restrict__ lse_rest,  // [batch, 32, q_len]
    const float* __restrict__ delta,  // [batch, 32, q_len]
    bf16* dK,  // [batch, 8, kv_len, 128]
    bf16* dV,  // [batch, 8, kv_len, 128]
    float* dq_sums,  // [batch, 32, ceil(q_len / 64), 32, 256, 1]
    long long q_stride_b, long long q_stride_h, long long q_stride_s,
    long long k_stride_b, long long k_stride_h, long long k_stride_s,
    long long v_stride_b, long long v_stride_h, long long v_stride_s,
    long long do_stride_b, long long do_stride_h, long long do_stride_s,
    long long dk_stride_b, long long dk_stride_h, long long dk_stride_s,
    long long dv_stride_b, long long dv_stride_h, long long dv_stride_s,
    long long lse_stride_b, long long lse_stride_h, long long lse_stride_s,
    long long lse_rest_stride_b, long long lse_rest_stride_h, long long lse_rest_stride_s,
    int q_len, int kv_len)
{
    constexpr int ROWS = 2 * ROW_BLOCKS, COLUMNS = PART / 4;  // a thread's keys, and its rows that are multiplied at once
    extern __shared__ __align__(16) unsigned char smem[];
    bf16* K_smem = (bf16*)(smem + K_SMEM);  // [BLOCK_KV][QK_WIDTH + PAD], in the end dK
    bf16* V_smem = (bf16*)(smem + V_SMEM);  // [BLOCK_KV][V_WIDTH + PAD], in the end dV
    bf16* Q_smem = (bf16*)(smem + Q_SMEM);  // [1][BLOCK_Q][QK_WIDTH + PAD]
    bf16* dO_smem = (bf16*)(smem + DO_SMEM);  // [1][BLOCK_Q][V_WIDTH + PAD]
    bf16* P_smem = (bf16*)(smem + P_SMEM);  // P^T [BLOCK_KV][TILE_WIDTH]
    bf16* dS_smem = (bf16*)(smem + DS_SMEM);  // dS^T [BLOCK_KV][TILE_WIDTH]
    RowValues* row_values = (RowValues*)(smem + ROW_VALUES_SMEM);  // [1]

    const KeyBlock key_block = key_block_of(blockIdx.x, kv_heads, kv_len);
    const int kv_block = key_block.kv_block, kv_h_idx = key_block.kv_h_idx, b_idx = key_block.b_idx;
    const int kv_lo = kv_block * BLOCK_KV, group_size = q_heads / kv_heads;
    KTile{K_smem}.load_async(K + b_idx * k_stride_b + kv_h_idx * k_stride_h, k_stride_s, kv_lo, kv_len);
    VTile{V_smem}.load_async(V + b_idx * v_stride_b + kv_h_idx * v_stride_h, v_stride_s, kv_lo, kv_len);

    float dK_frag[ROWS][QK_COLUMNS / 4] = {}, dV_frag[ROWS][V_COLUMNS / 4] = {};
    constexpr int stage = 0;  // the only one
    for (int h_idx = kv_h_idx * group_size; h_idx < (kv_h_idx + 1) * group_size; ++h_idx) {
        const int kv_hi = min(kv_lo + BLOCK_KV, kv_len) - 1;
        const QRange range = q_range(kv_lo, kv_hi, q_len);
        const int tile_end = (range.end + BLOCK_Q - 1) / BLOCK_Q;
        const int full_tile_begin = (range.full_begin + BLOCK_Q - 1) / BLOCK_Q;
        const int full_tile_end = range.full_end / BLOCK_Q;
        int tile = range.begin / BLOCK_Q;

        const auto load_rows = [&](int next, int to) {
            const int q_lo = next * BLOCK_Q, b = opaque(b_idx), h = opaque(h_idx);  // no address is kept in registers
            QTile{Q_smem + to * QTile::ELEMENTS}.load_async(
                Q + b * q_stride_b + h * q_stride_h, q_stride_s, q_lo, q_len);
            DoTile{dO_smem + to * DoTile::ELEMENTS}.load_async(
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
            const bool partial = kv_lo + BLOCK_KV > kv_len || tile < full_tile_begin || tile >= full_tile_end;
            const int following = tile + 1;
            cp_async_wait<0>();  // this thread's copies of the tile have arrived; after the barrier, all threads' copies
            if (thread_index() < BLOCK_Q) {  // this thread has copied the row
                float& row_lse = row_values[stage].lse[thread_index()];
                row_lse = finite_or_0(row_lse);
            }
            __syncthreads();
            const bf16* Q_tile = Q_smem + stage * QTile::ELEMENTS;
            const bf16* dO_tile = dO_smem + stage * DoTile::ELEMENTS;
            const RowValues& of_rows = row_values[stage];
#pragma unroll 1
            for (int part = 0; part < OWN_ROWS; part += PART) {
                const auto [warp_key, share] = warp_place();
                const int part_row = share * OWN_ROWS + part;  // the row in the tile
                const int q_lo = tile * BLOCK_Q + part_row;
                const bf16 *Q_rows = Q_tile + part_row * (QK_WIDTH + PAD), *dO_rows = dO_tile + part_row * (V_WIDTH + PAD);

                // S^T = K Q^T, dP^T = V dO^T
                float S_frag[ROWS][COLUMNS] = {}, dP_frag[ROWS][COLUMNS] = {};
                multiply_rows<QK_WIDTH, QK_STEPS>(S_frag, K_smem + warp_key * (QK_WIDTH + PAD), Q_rows);
                multiply_rows<V_WIDTH, V_STEPS>(dP_frag, V_smem + warp_key * (V_WIDTH + PAD), dO_rows);

                // Rows and columns of the fragments' elements, from the thread's number: kept, they would cost registers
                const int thread = thread_index(), first_column = thread % 4 * 2, first_row = warp_key + thread % 32 / 4;
                const auto column_of = [&](int j) { return first_column + j / 2 * 8 + j % 2; };
                const auto row_of = [&](int r) { return first_row + 8 * r; };
                // P takes the place of S, dS that of dP
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        const int row = part_row + column_of(j);  // the row in the tile
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
                            const int q_idx = q_lo + column_of(j);
                            const int kv_idx = kv_lo + row_of(r);
                            const bool allowed = mask(q_idx, kv_idx);
                            if (q_lo + column_of(j) >= q_len || kv_idx >= kv_len || !allowed) S_frag[r][j] = dP_frag[r][j] = 0.0f;
                        }
                }

                const Factors<ROWS, COLUMNS> P_factors(S_frag), dS_factors(dP_frag);
                store_factors(P_smem + warp_key * TILE_WIDTH + part_row, P_factors);
                store_factors(dS_smem + warp_key * TILE_WIDTH + part_row, dS_factors);
                // dV += P^T dO, of the warp's own rows
                if (partial)
                    multiply_fragments<V_WIDTH, true>(dV_frag, P_factors, dO_rows + share * V_COLUMNS);
                else
                    multiply_fragments<V_WIDTH, false>(dV_frag, P_factors, dO_rows + share * V_COLUMNS);
                // dK += dS^T Q, of the warp's own rows
                if (partial)
                    multiply_fragments<QK_WIDTH, true>(dK_frag, dS_factors, Q_rows + share * QK_COLUMNS);
                else
                    multiply_fragments<QK_WIDTH, false>(dK_frag, dS_factors, Q_rows + share * QK_COLUMNS);
            }
            __syncthreads();  // all warps have stored P and dS

            const DqPart dq_place = dq_part();
            const auto [warp_key, share] = warp_place();
            // dQ, and the rows of the other warps that have the same keys. dQ goes out between products: additions one after
            // another would hold up the fragments behind them
            float dQ_frag[DQ_ROWS / 8][DQ_COLUMNS / 4] = {};
            // dQ = dS K
            if (partial)
                multiply_stored<QK_WIDTH, true, BLOCK_KV, true>(dQ_frag, dS_smem + dq_place.row, K_smem + dq_place.column);
            else
                multiply_stored<QK_WIDTH, false, BLOCK_KV, true>(dQ_frag, dS_smem + dq_place.row, K_smem + dq_place.column);
#pragma unroll
            for (int other = 1; other < SHARES; ++other) {
                const int row = (share + other) % SHARES * OWN_ROWS;
                const bf16* P_other = P_smem + warp_key * TILE_WIDTH + row;
                const bf16* dS_other = dS_smem + warp_key * TILE_WIDTH + row;
                const bf16* dO_other = dO_tile + row * (V_WIDTH + PAD) + share * V_COLUMNS;
                const bf16* Q_other = Q_tile + row * (QK_WIDTH + PAD) + share * QK_COLUMNS;
                // dV += P^T dO
                if (partial)
                    multiply_stored<V_WIDTH, true, OWN_ROWS, false>(dV_frag, P_other, dO_other);
                else
                    multiply_stored<V_WIDTH, false, OWN_ROWS, false>(dV_frag, P_other, dO_other);
                add_dq<2 * SHARES - 2>(dq_sums + first_sum(q_len, opaque(b_idx) * q_heads + opaque(h_idx), tile), dQ_frag, 2 * other - 2);
                // dK += dS^T Q
                if (partial)
                    multiply_stored<QK_WIDTH, true, OWN_ROWS, false>(dK_frag, dS_other, Q_other);
                else
                    multiply_stored<QK_WIDTH, false, OWN_ROWS, false>(dK_frag, dS_other, Q_other);
                add_dq<2 * SHARES - 2>(dq_sums + first_sum(q_len, opaque(b_idx) * q_heads + opaque(h_idx), tile), dQ_frag, 2 * other - 1);
            }
            __syncthreads();  // all threads are done with the tile: the next one may replace it
            if (following < tile_end) load_rows(following, stage);
            cp_async_commit();
            tile = following;
        }
    }

    // The sums go through shared memory, in place of the keys: whole rows are then written, 16 bytes a lane
    cp_async_wait<0>();
    __syncthreads();  // all threads are done with the keys; if no tile was visited, these may not have arrived
    const KeyBlock end = key_block_of(opaque(blockIdx.x), kv_heads, kv_len);  // recomputed: kept, it would cost registers
    const auto [warp_key, share] = warp_place();
    const int first_key = end.kv_block * BLOCK_KV + warp_key, existing = kv_len - first_key;
    const int dK_column = share * QK_COLUMNS;
    bf16* dK_smem = K_smem + warp_key * (QK_WIDTH + PAD) + dK_column;
    store_fragments<QK_WIDTH>(dK_smem, dK_frag, softmax_scale);
    const int dV_column = share * V_COLUMNS;
    bf16* dV_smem = V_smem + warp_key * (V_WIDTH + PAD) + dV_column;
    store_fragments<V_WIDTH>(dV_smem, dV_frag, 1.0f);
    __syncwarp();
    bf16* dk_rows =
        dK + end.b_idx * dk_stride_b + end.kv_h_idx * dk_stride_h + first_key * dk_stride_s;
    store_rows<QK_COLUMNS, QK_WIDTH>(
        dk_rows + dK_column, dk_stride_s, dK_smem, existing,
        HEAD_DIM - dK_column);
    bf16* dv_rows =
        dV + end.b_idx * dv_stride_b + end.kv_h_idx * dv_stride_h + first_key * dv_stride_s;
    store_rows<V_COLUMNS, V_WIDTH>(
        dv_rows + dV_column, dv_stride_s, dV_smem, existing,
        HEAD_DIM_V - dV_column);
}

// 10. dQ from its sums
//
//     dQ = softmax_scale * its sum
//
// A block has a tile of rows, whose sums lie as the registers of the kernel above. They go through shared memory: whole rows are
// then written, 16 bytes a lane.

extern "C" __global__ void __launch_bounds__(THREADS)
llama_rotary_backward_convert_dq(
    const float* __restrict__ dq_sums,  // [batch, 32, ceil(q_len / 64), 32, 256, 1]
    bf16* dQ,  // [batch, 32, q_len, 128]
    long long dq_stride_b, long long dq_stride_h, long long dq_stride_s,
    int q_len)
{
    __shared__ __align__(16) bf16 parts_smem[THREADS / 32][DQ_ROWS * (DQ_COLUMNS + PAD)];

    const int q_tiles = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    const int h_idx = blockIdx.x / q_tiles % q_heads, b_idx = blockIdx.x / q_tiles / q_heads;
    const float* const sums = dq_sums + first_sum(q_len, b_idx * q_heads + h_idx, blockIdx.x % q_tiles);
    const DqPart place = dq_part();
    const int first_row = blockIdx.x % q_tiles * BLOCK_Q + place.row;
    bf16* const dQ_smem = parts_smem[thread_index() / 32];
    bf16* const dq_rows = dQ + b_idx * dq_stride_b + h_idx * dq_stride_h + first_row * dq_stride_s;
#pragma unroll
    for (int chunk = 0; chunk < DQ_CHUNKS; ++chunk) {
        float dQ_frag[DQ_ROWS / 8][DQ_COLUMNS / 4];
#pragma unroll
        for (int r = 0; r < DQ_ROWS / 8; ++r)
#pragma unroll
            for (int j = 0; j < DQ_COLUMNS / 4; j += 1) {
                const float* from = sums + chunk * DQ_CHUNK + (r * (DQ_COLUMNS / 4) + j) * THREADS;
                dQ_frag[r][j] = *from;
            }
        const int column = place.column + chunk * DQ_COLUMNS;
        store_fragments<DQ_COLUMNS>(dQ_smem, dQ_frag, softmax_scale);
        __syncwarp();
        store_rows<DQ_COLUMNS, DQ_COLUMNS>(dq_rows + column, dq_stride_s, dQ_smem, min(q_len - first_row, DQ_ROWS), HEAD_DIM - column);
    }
}
