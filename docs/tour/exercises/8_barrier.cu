// gpt2, fused, backward
// =====================
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
//     delta fp32 [batch, q_heads, q_len], workspace
//
// Plan, for sm_75 (Turing: T4, RTX 20)
//     schedule = fused_simt_backward: sm_75 has no cp.async, no mma.sync on fp16 with 16 x 8 x 16 tiles: products on
//         the ordinary arithmetic units
//     gradients = q, k, v: other gradients are not computed
//     weights = recomputed: from scores and the lse of their row, which the forward has saved: O(q_len) bytes
//     lse = lse + lse_rest: one fp32 number cannot hold a large maximum and the logarithm of a sum beside it
//     delta = O and dO: a sum over d: no key is visited
//     kernels = delta and dk_dv and dq: keys stay for dK and dV, rows for dQ: a block adds up alone what it owns, in
//         a fixed order
//     BLOCK_Q x BLOCK_KV = 32 x 32: the largest of these squares, which serve both kernels, that fits 64 KiB of
//         shared memory
//     THREADS = 128: 16 x 8 threads over the tile
//     BLOCKS = 1: an SM has shared memory and registers for as many
//     stages = 1: other blocks on the same multiprocessor compute while this one loads
//
// Shared memory of a block, 39808 bytes
//          0  Q        fp32 [32][64 + 4], query rows: a tile of them, or the block's own
//       8704  K        fp32 [32][64 + 4], keys: the block's own, or a tile of them
//      17408  V        fp32 [32][64 + 4], their values
//      26112  DO       fp32 [32][64 + 4], the rows' gradients of O
//      34816  W        fp32 [32][32 + 4], weights of the tile's pairs, each row used by the warp that wrote it
//      39424  ROWS     fp32 [3][32], lse, lse_rest, delta of a tile's rows
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. This variant's score and mask
//     4. Which tiles are visited
//     5. Loading tiles
//     6. Products
//     7. Delta
//     8. dK and dV
//     9. dQ

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;
constexpr float softmax_scale = 0.125f;
constexpr int BLOCK = 32;  // rows, or keys, that a block owns, and of a tile that it visits
constexpr int BLOCK_Q = BLOCK;
constexpr int BLOCK_KV = BLOCK;
constexpr int THREADS = 128;
constexpr int BLOCKS = 1;  // that an SM should hold at once: it limits the registers of a thread
constexpr int Q_SMEM = 0;
constexpr int K_SMEM = 8704;
constexpr int V_SMEM = 17408;
constexpr int DO_SMEM = 26112;
constexpr int W_SMEM = 34816;
constexpr int ROWS_SMEM = 39424;
constexpr int ROW_THREADS = 16;  // the block's threads as a grid over a tile: its rows
constexpr int COLUMN_THREADS = 8;
constexpr int ROWS = BLOCK / ROW_THREADS;  // own rows of a thread
constexpr int COLUMNS = BLOCK / COLUMN_THREADS;  // rows of a thread in a tile
constexpr int QK_DIMS = HEAD_DIM / COLUMN_THREADS;  // dimensions of dQ and dK of a thread
constexpr int V_DIMS = HEAD_DIM_V / COLUMN_THREADS;  // dimensions of dV of a thread
constexpr int QK_SLICE = 16;  // terms of a sum that are summed by themselves
constexpr int V_SLICE = 8;
constexpr int W_SLICE = 16;  // rows of a tile
constexpr int QK_VECTOR = 4;  // neighbouring dimensions that a thread has
constexpr int V_VECTOR = 4;
constexpr int PAD = 4;  // floats at the end of each row in shared memory: its neighbours start in other banks
constexpr int QK_STRIDE = HEAD_DIM + PAD;  // floats from row to row in shared memory
constexpr int V_STRIDE = HEAD_DIM_V + PAD;
constexpr int W_STRIDE = BLOCK + PAD;

// 2. Primitives

// fp16: 1 sign, 5 exponent, 10 fraction bits.
struct fp16 { unsigned short bits; };

__device__ __forceinline__ float to_float(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ __forceinline__ fp16 to_fp16(float x) {
    fp16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// `lse`, or 0 if it is -inf, because the row has no keys: exp(-inf - 0) = 0, not NaN.
__device__ __forceinline__ float finite_or_0(float lse) {
    return lse == -INF ? 0.0f : lse;
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

// 5. Loading tiles

template <typename T, int N> struct alignas(N * sizeof(T)) Vector { T at[N]; };

// tile[r][c] = matrix[r][c] as fp32, zero from row `rows` on; rows of the tile are STRIDE floats apart.
template <int ROWS, int COLUMNS, int STRIDE, typename T>
__device__ __forceinline__ void load_tile(
    float* tile, const T* matrix, long long row_stride, long long column_stride, int rows)
{
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
        const int r = i / COLUMNS, c = i % COLUMNS;
        tile[r * STRIDE + c] = r < rows ? to_float(matrix[r * row_stride + c * column_stride]) : 0.0f;
    }
}

// The threads as a grid of ROW_THREADS x COLUMN_THREADS over a tile.
__device__ __forceinline__ int thread_row() {
    return threadIdx.x / COLUMN_THREADS;
}
__device__ __forceinline__ int thread_column() {
    return threadIdx.x % COLUMN_THREADS;
}

// Where the i-th element of thread `t` is among those of `threads` threads.
__device__ __forceinline__ int spread(int t, int threads, int i) { return t + threads * i; }

// 6. Products
//
// A block owns BLOCK rows, of keys or of queries, and tiles of BLOCK rows of the other kind pass by. Thread (ty, tx) has the own
// rows row_of(r) and the rows column_of(j) of every tile: S_frag and dP_frag. Of a sum over all tiles it has its own rows, and
// VECTOR neighbouring dimensions at a time. The terms of a slice are summed by themselves: rounding errors grow with the partial
// sums (Higham 1993).

// frag[r][j] = sum over d of own[row_of(r)][d] * tile[column_of(j)][d], for rows of LENGTH floats, STRIDE apart.
template <int LENGTH, int STRIDE, int SLICE>
__device__ __forceinline__ void dot_products(float (&frag)[ROWS][COLUMNS], const float* own, const float* tile) {
    const float* own_row = own + thread_row() * STRIDE;
    const float* tile_row = tile + thread_column() * STRIDE;
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < COLUMNS; ++j) frag[r][j] = 0.0f;
#pragma unroll 1
    for (int begin = 0; begin < LENGTH; begin += SLICE) {
        float part[ROWS][COLUMNS] = {};
#pragma unroll
        for (int d = begin; d < begin + SLICE; d += 4) {
            Vector<float, 4> x[ROWS], y[COLUMNS];
            for (int r = 0; r < ROWS; ++r) x[r] = *(const Vector<float, 4>*)&own_row[spread(0, ROW_THREADS, r) * STRIDE + d];
            for (int j = 0; j < COLUMNS; ++j)
                y[j] = *(const Vector<float, 4>*)&tile_row[spread(0, COLUMN_THREADS, j) * STRIDE + d];
            for (int r = 0; r < ROWS; ++r)
                for (int j = 0; j < COLUMNS; ++j)
                    for (int e = 0; e < 4; ++e) part[r][j] = fmaf(x[r].at[e], y[j].at[e], part[r][j]);
        }
        for (int r = 0; r < ROWS; ++r)
            for (int j = 0; j < COLUMNS; ++j) frag[r][j] += part[r][j];
    }
}

// sum[r][c] += sum over i of weights[row_of(r)][i] * tile[i][dimension c of the thread], for rows of the tile STRIDE floats apart.
// SKIPS: a weight of 0 is not multiplied, for a pair that the mask excludes may have NaN in its row of the tile.
template <int DIMS, int VECTOR, int STRIDE, bool SKIPS>
__device__ __forceinline__ void add_product(float (&sum)[ROWS][DIMS], const float* weights, const float* tile) {
    const float* weights_row = weights + thread_row() * W_STRIDE;
#pragma unroll
    for (int c = 0; c < DIMS; c += VECTOR) {
        const float* tile_column = tile + thread_column() * VECTOR + c * COLUMN_THREADS;
#pragma unroll 1
        for (int begin = 0; begin < BLOCK; begin += W_SLICE) {
            float part[ROWS][VECTOR] = {};
#pragma unroll
            for (int i = begin; i < begin + W_SLICE; i += 4) {
                Vector<float, 4> w[ROWS];
                for (int r = 0; r < ROWS; ++r)
                    w[r] = *(const Vector<float, 4>*)&weights_row[spread(0, ROW_THREADS, r) * W_STRIDE + i];
                for (int e = 0; e < 4; ++e) {
                    const auto x = *(const Vector<float, VECTOR>*)&tile_column[(i + e) * STRIDE];
                    for (int r = 0; r < ROWS; ++r)
                        if (!SKIPS || w[r].at[e] != 0.0f)
                            for (int n = 0; n < VECTOR; ++n) part[r][n] = fmaf(w[r].at[e], x.at[n], part[r][n]);
                }
            }
            for (int r = 0; r < ROWS; ++r)
                for (int n = 0; n < VECTOR; ++n) sum[r][c + n] += part[r][n];
        }
    }
}

// weights[row_of(r)][column_of(j)] = frag[r][j]
__device__ __forceinline__ void store_weights(float* weights, const float (&frag)[ROWS][COLUMNS]) {
    __syncwarp();  // every lane is done with the weights before: a row is written and read by the same warp
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < COLUMNS; ++j)
            weights[spread(thread_row(), ROW_THREADS, r) * W_STRIDE + spread(thread_column(), COLUMN_THREADS, j)] = frag[r][j];
    __syncwarp();  // the weights are complete
}

// Stores `factor` times the first `rows` own rows of a sum.
template <int DIMS, int VECTOR>
__device__ __forceinline__ void store_sum(
    fp16* matrix, long long row_stride, long long column_stride, const float (&sum)[ROWS][DIMS], float factor, int rows)
{
    for (int r = 0; r < ROWS; ++r) {
        const int row = spread(thread_row(), ROW_THREADS, r);
        if (row >= rows) continue;
        for (int c = 0; c < DIMS; c += VECTOR)
            for (int n = 0; n < VECTOR; ++n) {
                const int d = thread_column() * VECTOR + c * COLUMN_THREADS + n;
                matrix[row * row_stride + d * column_stride] = to_fp16(factor * sum[r][c + n]);
            }
    }
}

// 7. Delta
//
//     delta[q] = sum over d of dO[q, d] * O[q, d]
//
// which is sum over k of P[k] * dP[k], for O is P V. A thread computes a row, in the order of the sums
// of dP: in a row of one key, this sum is dP bit by bit, and dS is 0.

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_backward_delta(
    const fp16* __restrict__ O,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ dO,  // [batch, q_heads, q_len, 64]
    float* delta,  // [batch, q_heads, q_len]
    long long o_stride_b, long long o_stride_h, long long o_stride_s, long long o_stride_d,
    long long do_stride_b, long long do_stride_h, long long do_stride_s, long long do_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    const int q_blocks = (q_len + THREADS - 1) / THREADS;
    unsigned block = blockIdx.x;
    const int q_idx = block % q_blocks * THREADS + threadIdx.x;
    block /= q_blocks;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    if (q_idx >= q_len) return;

    const fp16* o_row = O + b_idx * o_stride_b + h_idx * o_stride_h + q_idx * o_stride_s;
    const fp16* do_row = dO + b_idx * do_stride_b + h_idx * do_stride_h + q_idx * do_stride_s;
    float sum = 0.0f;
    for (int begin = 0; begin < HEAD_DIM_V; begin += V_SLICE) {
        float part = 0.0f;
        for (int d = begin; d < begin + V_SLICE; ++d)
            part = fmaf(to_float(do_row[d * do_stride_d]), to_float(o_row[d * o_stride_d]), part);
        sum += part;
    }
    delta[((long long)b_idx * q_heads + h_idx) * q_len + q_idx] = sum;
}

// 8. dK and dV
//
//     P  = exp(S - lse)  with S = s   where q >= k, else 0
//     dS = P * (dO V^T - delta)   where q >= k, else 0
//     dK = softmax_scale * sum over query heads of dS^T Q
//     dV = sum over query heads of P^T dO
//
// A block owns BLOCK_KV keys of a key/value head. It visits the rows of every query head that shares them, head by head and tile
// by tile, always in the same order: what is added up stays in registers, and has the same bits in every run.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gpt2_backward_dk_dv(
    const fp16* __restrict__ Q,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ K,  // [batch, kv_heads, kv_len, 64]
    const fp16* __restrict__ V,  // [batch, kv_heads, kv_len, 64]
    const fp16* __restrict__ dO,  // [batch, q_heads, q_len, 64]
    fp16* dK,  // [batch, kv_heads, kv_len, 64]
    fp16* dV,  // [batch, kv_heads, kv_len, 64]
    const float* __restrict__ lse,  // [batch, q_heads, q_len]
    long long lse_stride_b, long long lse_stride_h, long long lse_stride_s,
    const float* __restrict__ lse_rest,  // [batch, q_heads, q_len]
    long long lse_rest_stride_b, long long lse_rest_stride_h, long long lse_rest_stride_s,
    const float* __restrict__ delta,  // [batch, q_heads, q_len]
    long long q_stride_b, long long q_stride_h, long long q_stride_s, long long q_stride_d,
    long long k_stride_b, long long k_stride_h, long long k_stride_s, long long k_stride_d,
    long long v_stride_b, long long v_stride_h, long long v_stride_s, long long v_stride_d,
    long long do_stride_b, long long do_stride_h, long long do_stride_s, long long do_stride_d,
    long long dk_stride_b, long long dk_stride_h, long long dk_stride_s, long long dk_stride_d,
    long long dv_stride_b, long long dv_stride_h, long long dv_stride_s, long long dv_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    extern __shared__ __align__(16) unsigned char smem[];
    float* Q_smem = (float*)(smem + Q_SMEM);    // [BLOCK_Q][QK_STRIDE]
    float* K_smem = (float*)(smem + K_SMEM);    // [BLOCK_KV][QK_STRIDE]
    float* V_smem = (float*)(smem + V_SMEM);    // [BLOCK_KV][V_STRIDE]
    float* dO_smem = (float*)(smem + DO_SMEM);  // [BLOCK_Q][V_STRIDE]
    float* W_smem = (float*)(smem + W_SMEM);    // [BLOCK_KV][W_STRIDE], P^T, then ds^T
    float* lse_smem = (float*)(smem + ROWS_SMEM);  // [BLOCK_Q]
    float* lse_rest_smem = (float*)(smem + ROWS_SMEM) + 1 * BLOCK_Q;  // [BLOCK_Q]
    float* delta_smem = (float*)(smem + ROWS_SMEM) + 2 * BLOCK_Q;  // [BLOCK_Q]

    const int kv_blocks = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    unsigned block = blockIdx.x;
    const int kv_block = block % kv_blocks;  // under a causal mask the first keys have most to do: first
    block /= kv_blocks;
    const int kv_h_idx = block % kv_heads;
    const int b_idx = block / kv_heads;
    const int group_size = q_heads / kv_heads;
    const int kv_lo = kv_block * BLOCK_KV;
    const int tx = thread_column(), ty = thread_row();
    const auto row_of = [&](int r) { return spread(ty, ROW_THREADS, r); };  // keys of the block, where S_frag's elements are
    const auto column_of = [&](int j) { return spread(tx, COLUMN_THREADS, j); };  // rows of a tile

    const fp16* k_head = K + b_idx * k_stride_b + kv_h_idx * k_stride_h;
    load_tile<BLOCK_KV, HEAD_DIM, QK_STRIDE>(K_smem, k_head + kv_lo * k_stride_s, k_stride_s, k_stride_d, kv_len - kv_lo);
    const fp16* v_head = V + b_idx * v_stride_b + kv_h_idx * v_stride_h;
    load_tile<BLOCK_KV, HEAD_DIM_V, V_STRIDE>(V_smem, v_head + kv_lo * v_stride_s, v_stride_s, v_stride_d, kv_len - kv_lo);

    float dK_frag[ROWS][QK_DIMS] = {};
    float dV_frag[ROWS][V_DIMS] = {};
    for (int h_idx = kv_h_idx * group_size; h_idx < (kv_h_idx + 1) * group_size; ++h_idx) {
        const fp16* q_head = Q + b_idx * q_stride_b + h_idx * q_stride_h;
        const fp16* do_head = dO + b_idx * do_stride_b + h_idx * do_stride_h;
        const int kv_hi = min(kv_lo + BLOCK_KV, kv_len) - 1;
        const QRange range = q_range(kv_lo, kv_hi, q_len);
        const int tile_end = (range.end + BLOCK_Q - 1) / BLOCK_Q;
        const int full_tile_begin = (range.full_begin + BLOCK_Q - 1) / BLOCK_Q;
        const int full_tile_end = range.full_end / BLOCK_Q;
        int tile = range.begin / BLOCK_Q;

        while (tile < tile_end) {
            const int q_lo = tile * BLOCK_Q;
            load_tile<BLOCK_Q, HEAD_DIM, QK_STRIDE>(Q_smem, q_head + q_lo * q_stride_s, q_stride_s, q_stride_d, q_len - q_lo);
            load_tile<BLOCK_Q, HEAD_DIM_V, V_STRIDE>(dO_smem, do_head + q_lo * do_stride_s, do_stride_s, do_stride_d, q_len - q_lo);
            for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) {
                const int q_idx = min(q_lo + i, q_len - 1);
                lse_smem[i] = finite_or_0(lse[b_idx * lse_stride_b + h_idx * lse_stride_h + q_idx * lse_stride_s]);
                lse_rest_smem[i] = lse_rest[b_idx * lse_rest_stride_b + h_idx * lse_rest_stride_h + q_idx * lse_rest_stride_s];
                delta_smem[i] = delta[((long long)b_idx * q_heads + h_idx) * q_len + q_idx];
            }
            __syncthreads();  // the tile (and, the first time, the keys) is complete

            // S^T = K Q^T, dP^T = V dO^T
            float S_frag[ROWS][COLUMNS];
            dot_products<HEAD_DIM, QK_STRIDE, QK_SLICE>(S_frag, K_smem, Q_smem);
            float dP_frag[ROWS][COLUMNS];
            dot_products<HEAD_DIM_V, V_STRIDE, V_SLICE>(dP_frag, V_smem, dO_smem);

            const bool partial = kv_lo + BLOCK_KV > kv_len || tile < full_tile_begin || tile >= full_tile_end;
            // P takes the place of S, dS that of dP
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    const int q_idx = q_lo + column_of(j), kv_idx = kv_lo + row_of(r);
                    const float s = S_frag[r][j] * softmax_scale;
                    const bool excluded = partial && (q_idx >= q_len || kv_idx >= kv_len || !mask(q_idx, kv_idx));
                    const float P = excluded ? 0.0f : expf(s - lse_smem[column_of(j)] - lse_rest_smem[column_of(j)]);
                    const float dS = P == 0.0f ? 0.0f : P * (dP_frag[r][j] - delta_smem[column_of(j)]);
                    dP_frag[r][j] = dS;
                    S_frag[r][j] = P;
                }

            // dV += P^T dO
            store_weights(W_smem, S_frag);
            if (partial) add_product<V_DIMS, V_VECTOR, V_STRIDE, true>(dV_frag, W_smem, dO_smem);
            else add_product<V_DIMS, V_VECTOR, V_STRIDE, false>(dV_frag, W_smem, dO_smem);
            // dK += ds^T Q
            store_weights(W_smem, dP_frag);
            if (partial) add_product<QK_DIMS, QK_VECTOR, QK_STRIDE, true>(dK_frag, W_smem, Q_smem);
            else add_product<QK_DIMS, QK_VECTOR, QK_STRIDE, false>(dK_frag, W_smem, Q_smem);
            tile = tile + 1;
        }
    }

    fp16* dk_head = dK + b_idx * dk_stride_b + kv_h_idx * dk_stride_h;
    store_sum<QK_DIMS, QK_VECTOR>(dk_head + kv_lo * dk_stride_s, dk_stride_s, dk_stride_d, dK_frag, softmax_scale, kv_len - kv_lo);
    fp16* dv_head = dV + b_idx * dv_stride_b + kv_h_idx * dv_stride_h;
    store_sum<V_DIMS, V_VECTOR>(dv_head + kv_lo * dv_stride_s, dv_stride_s, dv_stride_d, dV_frag, 1.0f,
                               kv_len - kv_lo);
}

// 9. dQ
//
//     P  = exp(S - lse)  with S = s   where q >= k, else 0
//     dS = P * (dO V^T - delta)   where q >= k, else 0
//     dQ = softmax_scale * dS K
//
// A block owns BLOCK_Q rows of a query head and visits tiles of keys, as the forward does.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gpt2_backward_dq(
    const fp16* __restrict__ Q,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ K,  // [batch, kv_heads, kv_len, 64]
    const fp16* __restrict__ V,  // [batch, kv_heads, kv_len, 64]
    const fp16* __restrict__ dO,  // [batch, q_heads, q_len, 64]
    fp16* dQ,  // [batch, q_heads, q_len, 64]
    const float* __restrict__ lse,  // [batch, q_heads, q_len]
    long long lse_stride_b, long long lse_stride_h, long long lse_stride_s,
    const float* __restrict__ lse_rest,  // [batch, q_heads, q_len]
    long long lse_rest_stride_b, long long lse_rest_stride_h, long long lse_rest_stride_s,
    const float* __restrict__ delta,  // [batch, q_heads, q_len]
    long long q_stride_b, long long q_stride_h, long long q_stride_s, long long q_stride_d,
    long long k_stride_b, long long k_stride_h, long long k_stride_s, long long k_stride_d,
    long long v_stride_b, long long v_stride_h, long long v_stride_s, long long v_stride_d,
    long long do_stride_b, long long do_stride_h, long long do_stride_s, long long do_stride_d,
    long long dq_stride_b, long long dq_stride_h, long long dq_stride_s, long long dq_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    extern __shared__ __align__(16) unsigned char smem[];
    float* Q_smem = (float*)(smem + Q_SMEM);    // [BLOCK_Q][QK_STRIDE]
    float* K_smem = (float*)(smem + K_SMEM);    // [BLOCK_KV][QK_STRIDE]
    float* V_smem = (float*)(smem + V_SMEM);    // [BLOCK_KV][V_STRIDE]
    float* dO_smem = (float*)(smem + DO_SMEM);  // [BLOCK_Q][V_STRIDE]
    float* W_smem = (float*)(smem + W_SMEM);    // [BLOCK_Q][W_STRIDE], dS

    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    unsigned block = blockIdx.x;
    const int q_block = q_blocks - 1 - block % q_blocks;  // under a causal mask the last rows have most to do: first
    block /= q_blocks;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int q_lo = q_block * BLOCK_Q;
    const int tx = thread_column(), ty = thread_row();
    const auto row_of = [&](int r) { return spread(ty, ROW_THREADS, r); };  // rows of the block, where S_frag's elements are
    const auto column_of = [&](int j) { return spread(tx, COLUMN_THREADS, j); };  // keys of a tile

    const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
    const KvRange range = kv_range(q_lo, q_hi, kv_len);
    const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_begin = (range.full_begin + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_end = range.full_end / BLOCK_KV;
    int tile = range.begin / BLOCK_KV;

    const fp16* q_head = Q + b_idx * q_stride_b + h_idx * q_stride_h;
    const fp16* do_head = dO + b_idx * do_stride_b + h_idx * do_stride_h;
    const fp16* k_head = K + b_idx * k_stride_b + kv_h_idx * k_stride_h;
    const fp16* v_head = V + b_idx * v_stride_b + kv_h_idx * v_stride_h;
    load_tile<BLOCK_Q, HEAD_DIM, QK_STRIDE>(Q_smem, q_head + q_lo * q_stride_s, q_stride_s, q_stride_d, q_len - q_lo);
    load_tile<BLOCK_Q, HEAD_DIM_V, V_STRIDE>(dO_smem, do_head + q_lo * do_stride_s, do_stride_s, do_stride_d, q_len - q_lo);
    float lse_of[ROWS], lse_rest_of[ROWS], delta_of[ROWS];  // values of this thread's rows
    for (int r = 0; r < ROWS; ++r) {
        const int q_idx = min(q_lo + row_of(r), q_len - 1);
        lse_of[r] = finite_or_0(lse[b_idx * lse_stride_b + h_idx * lse_stride_h + q_idx * lse_stride_s]);
        lse_rest_of[r] = lse_rest[b_idx * lse_rest_stride_b + h_idx * lse_rest_stride_h + q_idx * lse_rest_stride_s];
        delta_of[r] = delta[((long long)b_idx * q_heads + h_idx) * q_len + q_idx];
    }

    float dQ_frag[ROWS][QK_DIMS] = {};
    while (tile < tile_end) {
        const int kv_lo = tile * BLOCK_KV;
        load_tile<BLOCK_KV, HEAD_DIM, QK_STRIDE>(K_smem, k_head + kv_lo * k_stride_s, k_stride_s, k_stride_d, kv_len - kv_lo);
        load_tile<BLOCK_KV, HEAD_DIM_V, V_STRIDE>(V_smem, v_head + kv_lo * v_stride_s, v_stride_s, v_stride_d, kv_len - kv_lo);
        __syncthreads();  // the tile (and, the first time, the rows) is complete

        // S = Q K^T, dP = dO V^T
        float S_frag[ROWS][COLUMNS], dP_frag[ROWS][COLUMNS];
        dot_products<HEAD_DIM, QK_STRIDE, QK_SLICE>(S_frag, Q_smem, K_smem);
        dot_products<HEAD_DIM_V, V_STRIDE, V_SLICE>(dP_frag, dO_smem, V_smem);

        const bool partial = q_lo + BLOCK_Q > q_len || tile < full_tile_begin || tile >= full_tile_end;
        // dS takes the place of dP
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const int q_idx = q_lo + row_of(r), kv_idx = kv_lo + column_of(j);
                const float s = S_frag[r][j] * softmax_scale;
                const bool excluded = partial && (q_idx >= q_len || kv_idx >= kv_len || !mask(q_idx, kv_idx));
                const float P = excluded ? 0.0f : expf(s - lse_of[r] - lse_rest_of[r]);
                const float dS = P == 0.0f ? 0.0f : P * (dP_frag[r][j] - delta_of[r]);
                dP_frag[r][j] = dS;
            }

        // dQ += ds K
        store_weights(W_smem, dP_frag);
        if (partial) add_product<QK_DIMS, QK_VECTOR, QK_STRIDE, true>(dQ_frag, W_smem, K_smem);
        else add_product<QK_DIMS, QK_VECTOR, QK_STRIDE, false>(dQ_frag, W_smem, K_smem);
        __syncthreads();  // everyone is done: the next tile may take its place
        tile = tile + 1;
    }

    fp16* dq_head = dQ + b_idx * dq_stride_b + h_idx * dq_stride_h;
    store_sum<QK_DIMS, QK_VECTOR>(dq_head + q_lo * dq_stride_s, dq_stride_s, dq_stride_d, dQ_frag, softmax_scale, q_len - q_lo);
}
