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
// Plan, for sm_75 (Turing: T4, RTX 20)
//     schedule = fused_simt: sm_75 has no cp.async, no mma.sync on fp16 with 16 x 8 x 16 tiles: products on the
//         ordinary arithmetic units
//     BLOCK_Q x BLOCK_KV = 64 x 32: the largest preferred tile that fits 64 KiB of shared memory and the registers
//     THREADS = 128: 16 x 8 threads over the tile
//     SLICE = 16: terms of Q K^T that are summed by themselves, a divisor of the head size
//     VECTOR = 4: a thread has 8 dimensions of O, in whole vectors
//     stages = 1: other blocks on the same multiprocessor compute while this one loads
//
// Shared memory of a block, 44032 bytes
//          0  Q        fp32 [64][64 + 4], the block's query rows
//      17408  K        fp32 [32][64 + 4], the tile's keys
//      26112  V        fp32 [32][64 + 4], the tile's values
//      34816  P        fp32 [64][32 + 4], the tile's weights, each row used by the warp that wrote it
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
constexpr int BLOCK_Q = 64;  // query rows of a block
constexpr int BLOCK_KV = 32;  // keys of a tile
constexpr int THREADS = 128;
constexpr int Q_SMEM = 0;
constexpr int K_SMEM = 17408;
constexpr int V_SMEM = 26112;
constexpr int P_SMEM = 34816;
constexpr int ROW_THREADS = 16;  // the block's threads as a grid over a tile: its rows
constexpr int COLUMN_THREADS = 8;  // and its columns
constexpr int ROWS = BLOCK_Q / ROW_THREADS;  // of a thread
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;  // keys of a thread in a tile
constexpr int DIMS = HEAD_DIM_V / COLUMN_THREADS;  // dimensions of O of a thread
constexpr int SLICE = 16;  // terms summed by themselves: rounding errors grow with the partial sums (Higham 1993)
constexpr int VECTOR = 4;  // neighbouring dimensions of O that a thread has
constexpr int PAD = 4;  // floats at the end of each row in shared memory: its neighbours start in other banks
constexpr int QK_STRIDE = HEAD_DIM + PAD;  // floats from row to row in shared memory
constexpr int V_STRIDE = HEAD_DIM_V + PAD;
constexpr int P_STRIDE = BLOCK_KV + PAD;

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
// A block computes BLOCK_Q rows, thread (ty, tx) the rows row_of(r) and the keys column_of(j) of every tile of S, and VECTOR
// neighbouring dimensions of O at a time. The products of a tile are summed by themselves.

// Sets a row's maximum to `new_max`, which is at least the old one, and `alpha` to exp(old - new), by which sums under the old
// maximum must be multiplied. Returns the maximum to subtract from scores.
__device__ __forceinline__ float raise_max(float& row_max, float& alpha, float new_max) {
    const float shift = new_max == -INF ? 0.0f : new_max;  // no key yet: exp(-inf - 0) = 0, not NaN
    alpha = expf(row_max - shift);
    row_max = new_max;
    return shift;
}

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_fused(
    const fp16* __restrict__ Q,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ K,  // [batch, kv_heads, kv_len, 64]
    const fp16* __restrict__ V,  // [batch, kv_heads, kv_len, 64]
    fp16* O,  // [batch, q_heads, q_len, 64]
    long long q_stride_b, long long q_stride_h, long long q_stride_s, long long q_stride_d,
    long long k_stride_b, long long k_stride_h, long long k_stride_s, long long k_stride_d,
    long long v_stride_b, long long v_stride_h, long long v_stride_s, long long v_stride_d,
    long long o_stride_b, long long o_stride_h, long long o_stride_s, long long o_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    extern __shared__ __align__(16) unsigned char smem[];
    float* Q_smem = (float*)(smem + Q_SMEM);  // [BLOCK_Q][QK_STRIDE]
    float* K_smem = (float*)(smem + K_SMEM);  // [BLOCK_KV][QK_STRIDE]
    float* V_smem = (float*)(smem + V_SMEM);  // [BLOCK_KV][V_STRIDE]
    float* P_smem = (float*)(smem + P_SMEM);  // [BLOCK_Q][P_STRIDE]

    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    unsigned block = blockIdx.x;
    const int q_block = q_blocks - 1 - block % q_blocks;  // under a causal mask the last rows have most to do: first
    block /= q_blocks;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int q_lo = q_block * BLOCK_Q;
    const int tx = thread_column(), ty = thread_row();
    const auto row_of = [&](int r) { return spread(ty, ROW_THREADS, r); };  // where the elements of S_frag are
    const auto column_of = [&](int j) { return spread(tx, COLUMN_THREADS, j); };

    const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
    const KvRange range = kv_range(q_lo, q_hi, kv_len);
    const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_begin = (range.full_begin + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_end = range.full_end / BLOCK_KV;
    int tile = range.begin / BLOCK_KV;

    const fp16* q_head = Q + b_idx * q_stride_b + h_idx * q_stride_h;
    const fp16* k_head = K + b_idx * k_stride_b + kv_h_idx * k_stride_h;
    const fp16* v_head = V + b_idx * v_stride_b + kv_h_idx * v_stride_h;

    load_tile<BLOCK_Q, HEAD_DIM, QK_STRIDE>(Q_smem, q_head + q_lo * q_stride_s, q_stride_s, q_stride_d, q_len - q_lo);

    float O_frag[ROWS][DIMS] = {};
    float row_max[ROWS], row_sum[ROWS];  // row_sum: this thread's keys only, until the end
    for (int r = 0; r < ROWS; ++r) {
        row_max[r] = -INF;
        row_sum[r] = 0.0f;
    }

    while (tile < tile_end) {
        const int kv_lo = tile * BLOCK_KV;
        load_tile<BLOCK_KV, HEAD_DIM, QK_STRIDE>(K_smem, k_head + kv_lo * k_stride_s, k_stride_s, k_stride_d, kv_len - kv_lo);
        load_tile<BLOCK_KV, HEAD_DIM_V, V_STRIDE>(V_smem, v_head + kv_lo * v_stride_s, v_stride_s, v_stride_d, kv_len - kv_lo);
        __syncthreads();  // the tile (and, the first time, Q) is complete

        // S = Q K^T
        float S_frag[ROWS][COLUMNS] = {};
#pragma unroll 1
        for (int begin = 0; begin < HEAD_DIM; begin += SLICE) {
            float part[ROWS][COLUMNS] = {};
#pragma unroll
            for (int d = begin; d < begin + SLICE; d += 4) {
                Vector<float, 4> q[ROWS], k[COLUMNS];
                for (int r = 0; r < ROWS; ++r) q[r] = *(const Vector<float, 4>*)&Q_smem[row_of(r) * QK_STRIDE + d];
                for (int j = 0; j < COLUMNS; ++j)
                    k[j] = *(const Vector<float, 4>*)&K_smem[column_of(j) * QK_STRIDE + d];
                for (int r = 0; r < ROWS; ++r)
                    for (int j = 0; j < COLUMNS; ++j)
                        for (int e = 0; e < 4; ++e) part[r][j] = fmaf(q[r].at[e], k[j].at[e], part[r][j]);
            }
            for (int r = 0; r < ROWS; ++r)
                for (int j = 0; j < COLUMNS; ++j) S_frag[r][j] += part[r][j];
        }

        const bool partial = tile < full_tile_begin || tile >= full_tile_end;

        // the score of every pair
        for (int r = 0; r < ROWS; ++r)
            for (int j = 0; j < COLUMNS; ++j) {
                const float s = S_frag[r][j] * softmax_scale;
                S_frag[r][j] = s;
            }

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
        // online softmax: what was summed is rescaled whenever the maximum grows
        for (int r = 0; r < ROWS; ++r) {
            float tile_max = row_max[r];
            for (int j = 0; j < COLUMNS; ++j) tile_max = fmaxf(tile_max, S_frag[r][j]);
            tile_max = lane_reduce<COLUMN_THREADS>(tile_max, [](float a, float b) { return fmaxf(a, b); });
            float alpha;
            const float shift = raise_max(row_max[r], alpha, tile_max);
            row_sum[r] *= alpha;
            for (int c = 0; c < DIMS; ++c) O_frag[r][c] *= alpha;
            for (int j = 0; j < COLUMNS; ++j) {
                const float p = expf(S_frag[r][j] - shift);
                row_sum[r] += p;
                P_smem[row_of(r) * P_STRIDE + column_of(j)] = p;
            }
        }

        // O += P V
#pragma unroll
        for (int c = 0; c < DIMS; c += VECTOR) {
            float part[ROWS][VECTOR] = {};
#pragma unroll 2
            for (int k = 0; k < BLOCK_KV; k += 4) {
                Vector<float, 4> p[ROWS];
                for (int r = 0; r < ROWS; ++r) p[r] = *(const Vector<float, 4>*)&P_smem[row_of(r) * P_STRIDE + k];
                for (int e = 0; e < 4; ++e) {
                    const float* v_row = V_smem + (k + e) * V_STRIDE;
                    const auto v = *(const Vector<float, VECTOR>*)&v_row[tx * VECTOR + c * COLUMN_THREADS];
                    for (int r = 0; r < ROWS; ++r)
                        for (int n = 0; n < VECTOR; ++n) part[r][n] = fmaf(p[r].at[e], v.at[n], part[r][n]);
                }
            }
            for (int r = 0; r < ROWS; ++r)
                for (int n = 0; n < VECTOR; ++n) O_frag[r][c + n] += part[r][n];
        }
        __syncthreads();  // everyone is done: the next may take its place
        tile = tile + 1;
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int q_idx = q_lo + row_of(r);
        row_sum[r] = lane_reduce<COLUMN_THREADS>(row_sum[r], [](float a, float b) { return a + b; });
        const float divisor = row_sum[r] == 0.0f ? 1.0f : row_sum[r];  // a row with no key gives 0
        if (q_idx >= q_len) continue;
        fp16* o_row = O + b_idx * o_stride_b + h_idx * o_stride_h + q_idx * o_stride_s;
        for (int c = 0; c < DIMS; c += VECTOR)
            for (int n = 0; n < VECTOR; ++n)
                o_row[(tx * VECTOR + c * COLUMN_THREADS + n) * o_stride_d] = to_fp16(O_frag[r][c + n] / divisor);
    }
}
