// cross_attention, tiled
// ======================
//
//     attention cross_attention {
//         dtype     fp32
//         head_dim  64
//         scale     0.125
//         output    lse
//     }
//
// For batch b, query head h and query row q, with the key/value head h / group_size:
//
//     s    = 0.125 * sum over d of Q[q, d] * K[k, d]
//     S[k] = s
//     P[k] = exp(S[k]) / (sum over k of exp(S[k]))
//     lse  = log(sum over k of exp(S[k]))
//     O[d] = sum over k of P[k] * V[k, d]
//
// Shapes
//     Q    fp32 [batch, q_heads, q_len, 64]
//     K    fp32 [batch, kv_heads, kv_len, 64]
//     V    fp32 [batch, kv_heads, kv_len, 64]
//     O    fp32 [batch, q_heads, q_len, 64], written
//     lse  fp32 [batch, q_heads, q_len], written
//     S    fp32 [batch, q_heads, q_len, kv_len], workspace
//
// Plan, for sm_75 (Turing: T4, RTX 20)
//     BLOCK_Q x BLOCK_KV = 64 x 64: each element in shared memory is used 64 times
//     THREADS = 256: 16 x 16 threads, each with 4 x 4 outputs in registers
//     scores = in global memory: the softmax needs whole rows; the fused rung removes this
//
// Sections
//     1. Numbers
//     2. Element types
//     3. Tiles in shared memory
//     4. Scores
//     5. Softmax
//     6. Weighted sum

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;
constexpr float softmax_scale = 0.125f;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int BLOCK_Q = 64;
constexpr int BLOCK_KV = 64;
constexpr int BLOCK_D = 16;  // terms of a sum in shared memory at a time
constexpr int OUTPUTS = BLOCK_Q / 16;  // rows, and columns, of a thread

// 2. Element types

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_fp32(float x) { return x; }

// 3. Tiles in shared memory
//
// The two products share their inner loop: a block computes BLOCK_Q x BLOCK_KV outputs from tiles of BLOCK_D terms in shared
// memory, a thread OUTPUTS x OUTPUTS of them, at rows ty + 16 i and columns tx + 16 j. The terms of one tile are summed by
// themselves: rounding errors grow with the partial sums (Higham 1993).

// tile[r][c] = matrix[r][c] as fp32, zero from `rows` or `columns` on.
template <int ROWS, int COLUMNS, typename T>
__device__ __forceinline__ void load_tile(float (&tile)[ROWS][COLUMNS + 1], const T* matrix, long long row_stride,
                                          long long column_stride, int rows, int columns) {
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
        const int r = i / COLUMNS, c = i % COLUMNS;
        tile[r][c] = r < rows && c < columns ? to_float(matrix[r * row_stride + c * column_stride]) : 0.0f;
    }
}

// 4. Scores
//
//     S[q, k] = s
//     with s = softmax_scale * sum over d of Q[q, d] * K[k, d]

extern "C" __global__ void __launch_bounds__(THREADS)
cross_attention_scores(
    const float* __restrict__ Q,  // [batch, q_heads, q_len, 64]
    const float* __restrict__ K,  // [batch, kv_heads, kv_len, 64]
    float* S,  // [batch, q_heads, q_len, kv_len]
    long long q_stride_b, long long q_stride_h, long long q_stride_s, long long q_stride_d,
    long long k_stride_b, long long k_stride_h, long long k_stride_s, long long k_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    __shared__ float Q_smem[BLOCK_Q][BLOCK_D + 1];  // one more: the 16 rows a warp reads lie in different banks
    __shared__ float K_smem[BLOCK_KV][BLOCK_D + 1];

    const int kv_blocks = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    int block = blockIdx.x;
    const int kv_lo = block % kv_blocks * BLOCK_KV;
    block /= kv_blocks;
    const int q_lo = block % q_blocks * BLOCK_Q;
    block /= q_blocks;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;

    const float* q_tile = Q + b_idx * q_stride_b + h_idx * q_stride_h + q_lo * q_stride_s;
    const float* k_tile = K + b_idx * k_stride_b + kv_h_idx * k_stride_h + kv_lo * k_stride_s;

    float dot[OUTPUTS][OUTPUTS] = {};
    for (int d0 = 0; d0 < HEAD_DIM; d0 += BLOCK_D) {
        load_tile<BLOCK_Q, BLOCK_D>(Q_smem, q_tile + d0 * q_stride_d, q_stride_s, q_stride_d, q_len - q_lo, HEAD_DIM - d0);
        load_tile<BLOCK_KV, BLOCK_D>(K_smem, k_tile + d0 * k_stride_d, k_stride_s, k_stride_d, kv_len - kv_lo, HEAD_DIM - d0);
        __syncthreads();  // both tiles are complete
        float part[OUTPUTS][OUTPUTS] = {};
#pragma unroll 8
        for (int d = 0; d < BLOCK_D; ++d) {
            float q[OUTPUTS], k[OUTPUTS];
            for (int i = 0; i < OUTPUTS; ++i) q[i] = Q_smem[ty + 16 * i][d];
            for (int j = 0; j < OUTPUTS; ++j) k[j] = K_smem[tx + 16 * j][d];
            for (int i = 0; i < OUTPUTS; ++i)
                for (int j = 0; j < OUTPUTS; ++j) part[i][j] = fmaf(q[i], k[j], part[i][j]);
        }
        for (int i = 0; i < OUTPUTS; ++i)
            for (int j = 0; j < OUTPUTS; ++j) dot[i][j] += part[i][j];
        __syncthreads();  // everyone has read them: the next ones may replace them
    }

    const long long head_row = ((long long)b_idx * q_heads + h_idx) * q_len;
    for (int i = 0; i < OUTPUTS; ++i) {
        const int q_idx = q_lo + ty + 16 * i;
        for (int j = 0; j < OUTPUTS; ++j) {
            const int kv_idx = kv_lo + tx + 16 * j;
            if (q_idx >= q_len || kv_idx >= kv_len) continue;
            const float s = dot[i][j] * softmax_scale;
            S[(head_row + q_idx) * kv_len + kv_idx] = s;
        }
    }
}

// 5. Softmax
//
//     P[k] = exp(S[k]) / (sum over k of exp(S[k]))
//     lse  = log(sum over k of exp(S[k]))
//
// One block computes one row, in place.

// `x` of all threads combined, known to all of them. `scratch` holds one value a warp.
template <typename Combine> __device__ __forceinline__ float block_reduce(float x, float (&scratch)[WARPS], Combine combine) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, lanes));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();  // every warp's value is there
    float all = scratch[0];
    for (int warp = 1; warp < WARPS; ++warp) all = combine(all, scratch[warp]);
    return all;
}

extern "C" __global__ void __launch_bounds__(THREADS)
cross_attention_softmax(
    float* S,  // [batch, q_heads, q_len, kv_len]
    float* lse,  // [batch, q_heads, q_len]
    long long lse_stride_b, long long lse_stride_h, long long lse_stride_s,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    int block = blockIdx.x;
    const int q_idx = block % q_len;
    block /= q_len;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;

    float* row = S + (((long long)b_idx * q_heads + h_idx) * q_len + q_idx) * kv_len;
    __shared__ float max_smem[WARPS];
    __shared__ float sum_smem[WARPS];

    float thread_max = -INF;
    for (int k = threadIdx.x; k < kv_len; k += THREADS) thread_max = fmaxf(thread_max, row[k]);
    const float row_max = block_reduce(thread_max, max_smem, [](float a, float b) { return fmaxf(a, b); });
    const float shift = row_max == -INF ? 0.0f : row_max;  // a row with no key: exp(-inf - 0) = 0, not NaN

    float thread_sum = 0.0f;
    for (int k = threadIdx.x; k < kv_len; k += THREADS) thread_sum += expf(row[k] - shift);
    const float row_sum = block_reduce(thread_sum, sum_smem, [](float a, float b) { return a + b; });

    const float divisor = row_sum == 0.0f ? 1.0f : row_sum;
    for (int k = threadIdx.x; k < kv_len; k += THREADS) row[k] = expf(row[k] - shift) / divisor;

    if (threadIdx.x == 0) lse[b_idx * lse_stride_b + h_idx * lse_stride_h + q_idx * lse_stride_s] = shift + logf(row_sum);
}

// 6. Weighted sum
//
//     O[q, d] = sum over k of P[q, k] * V[k, d]
//
// The columns of the output tile are dimensions here, and the sum runs over keys.

extern "C" __global__ void __launch_bounds__(THREADS)
cross_attention_weighted_sum(
    const float* __restrict__ P,  // [batch, q_heads, q_len, kv_len]
    const float* __restrict__ V,  // [batch, kv_heads, kv_len, 64]
    float* O,  // [batch, q_heads, q_len, 64]
    long long v_stride_b, long long v_stride_h, long long v_stride_s, long long v_stride_d,
    long long o_stride_b, long long o_stride_h, long long o_stride_s, long long o_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    __shared__ float P_smem[BLOCK_Q][BLOCK_D + 1];
    __shared__ float V_smem[BLOCK_D][BLOCK_KV + 1];

    const int d_blocks = (HEAD_DIM_V + BLOCK_KV - 1) / BLOCK_KV;
    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    int block = blockIdx.x;
    const int d_lo = block % d_blocks * BLOCK_KV;
    block /= d_blocks;
    const int q_lo = block % q_blocks * BLOCK_Q;
    block /= q_blocks;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;

    const float* p_tile = P + (((long long)b_idx * q_heads + h_idx) * q_len + q_lo) * kv_len;
    const float* v_tile = V + b_idx * v_stride_b + kv_h_idx * v_stride_h + d_lo * v_stride_d;

    float sum[OUTPUTS][OUTPUTS] = {};
    for (int k0 = 0; k0 < kv_len; k0 += BLOCK_D) {
        load_tile<BLOCK_Q, BLOCK_D>(P_smem, p_tile + k0, kv_len, 1, q_len - q_lo, kv_len - k0);
        load_tile<BLOCK_D, BLOCK_KV>(V_smem, v_tile + k0 * v_stride_s, v_stride_s, v_stride_d, kv_len - k0, HEAD_DIM_V - d_lo);
        __syncthreads();  // both tiles are complete
        float part[OUTPUTS][OUTPUTS] = {};
#pragma unroll 8
        for (int k = 0; k < BLOCK_D; ++k) {
            float p[OUTPUTS], v[OUTPUTS];
            for (int i = 0; i < OUTPUTS; ++i) p[i] = P_smem[ty + 16 * i][k];
            for (int j = 0; j < OUTPUTS; ++j) v[j] = V_smem[k][tx + 16 * j];
            for (int i = 0; i < OUTPUTS; ++i)
                for (int j = 0; j < OUTPUTS; ++j) part[i][j] = fmaf(p[i], v[j], part[i][j]);
        }
        for (int i = 0; i < OUTPUTS; ++i)
            for (int j = 0; j < OUTPUTS; ++j) sum[i][j] += part[i][j];
        __syncthreads();  // everyone has read them: the next ones may replace them
    }

    float* o_head = O + b_idx * o_stride_b + h_idx * o_stride_h;
    for (int i = 0; i < OUTPUTS; ++i) {
        const int q_idx = q_lo + ty + 16 * i;
        for (int j = 0; j < OUTPUTS; ++j) {
            const int d = d_lo + tx + 16 * j;
            if (q_idx < q_len && d < HEAD_DIM_V) o_head[q_idx * o_stride_s + d * o_stride_d] = to_fp32(sum[i][j]);
        }
    }
}
