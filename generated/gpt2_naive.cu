// gpt2, naive
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
//     S    fp32 [batch, q_heads, q_len, kv_len], workspace
//
// Plan, for sm_80 (Ampere: A100)
//     kernels = 3: scores, row weights and weighted sum, each as its equation reads
//     THREADS = 128: enough warps to hide latency; the kernels share nothing between threads
//     THREADS_D = 64: the head size of V in whole warps
//     scores = in global memory: O(q_len * kv_len) bytes, which the other schedules reduce or avoid
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. This variant's score and mask
//     4. Scores
//     5. Softmax
//     6. Weighted sum

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;
constexpr float softmax_scale = 0.125f;
constexpr int THREADS = 128;
constexpr int THREADS_D = 64;  // the head size of V in whole warps
constexpr int SLICE = 16;  // terms summed by themselves: rounding errors grow with the partial sums (Higham 1993)

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

// 3. This variant's score and mask

// allowed: q >= k
__device__ __forceinline__ bool mask(int q_idx, int kv_idx) {
    return q_idx >= kv_idx;
}

// 4. Scores
//
//     S[q, k] = s  where q >= k, else -inf
//     with s = softmax_scale * sum over d of Q[q, d] * K[k, d]
//
// One thread computes one score.

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_scores(
    const fp16* __restrict__ Q,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ K,  // [batch, kv_heads, kv_len, 64]
    float* S,  // [batch, q_heads, q_len, kv_len]
    long long q_stride_b, long long q_stride_h, long long q_stride_s, long long q_stride_d,
    long long k_stride_b, long long k_stride_h, long long k_stride_s, long long k_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    const int kv_blocks = (kv_len + THREADS - 1) / THREADS;
    int block = blockIdx.x;
    const int kv_idx = block % kv_blocks * THREADS + threadIdx.x;
    block /= kv_blocks;
    const int q_idx = block % q_len;
    block /= q_len;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    if (kv_idx >= kv_len) return;

    const fp16* q_head = Q + b_idx * q_stride_b + h_idx * q_stride_h;
    const fp16* k_head = K + b_idx * k_stride_b + kv_h_idx * k_stride_h;
    const fp16* q_row = q_head + q_idx * q_stride_s;
    const fp16* k_row = k_head + kv_idx * k_stride_s;
    float dot = 0.0f;
    for (int begin = 0; begin < HEAD_DIM; begin += SLICE) {
        float part = 0.0f;
        for (int d = begin; d < min(begin + SLICE, HEAD_DIM); ++d)
            part = fmaf(to_float(q_row[d * q_stride_d]), to_float(k_row[d * k_stride_d]), part);
        dot += part;
    }

    const float s = dot * softmax_scale;
    const long long row = ((long long)b_idx * q_heads + h_idx) * q_len + q_idx;
    S[row * kv_len + kv_idx] = mask(q_idx, kv_idx) ? s : -INF;
}

// 5. Softmax
//
//     P[k] = exp(S[k]) / (sum over k of exp(S[k]))
//
// One thread computes one row, in place.

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_softmax(
    float* S,  // [batch, q_heads, q_len, kv_len]
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    const int q_blocks = (q_len + THREADS - 1) / THREADS;
    int block = blockIdx.x;
    const int q_idx = block % q_blocks * THREADS + threadIdx.x;
    block /= q_blocks;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    if (q_idx >= q_len) return;

    float* row = S + (((long long)b_idx * q_heads + h_idx) * q_len + q_idx) * kv_len;

    float row_max = -INF;
    for (int k = 0; k < kv_len; ++k) row_max = fmaxf(row_max, row[k]);
    const float shift = row_max == -INF ? 0.0f : row_max;  // a row with no key: exp(-inf - 0) = 0, not NaN

    float row_sum = 0.0f;
    for (int begin = 0; begin < kv_len; begin += SLICE) {
        float part = 0.0f;
        for (int k = begin; k < min(begin + SLICE, kv_len); ++k) part += expf(row[k] - shift);
        row_sum += part;
    }

    const float divisor = row_sum == 0.0f ? 1.0f : row_sum;
    for (int k = 0; k < kv_len; ++k) row[k] = expf(row[k] - shift) / divisor;
}

// 6. Weighted sum
//
//     O[q, d] = sum over k of P[q, k] * V[k, d]
//
// One block computes one row of O, one thread one element.

extern "C" __global__ void __launch_bounds__(THREADS_D)
gpt2_weighted_sum(
    const float* __restrict__ P,  // [batch, q_heads, q_len, kv_len]
    const fp16* __restrict__ V,  // [batch, kv_heads, kv_len, 64]
    fp16* O,  // [batch, q_heads, q_len, 64]
    long long v_stride_b, long long v_stride_h, long long v_stride_s, long long v_stride_d,
    long long o_stride_b, long long o_stride_h, long long o_stride_s, long long o_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    int block = blockIdx.x;
    const int q_idx = block % q_len;
    block /= q_len;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int d = threadIdx.x;
    if (d >= HEAD_DIM_V) return;

    const float* p_row = P + (((long long)b_idx * q_heads + h_idx) * q_len + q_idx) * kv_len;
    const fp16* v_head = V + b_idx * v_stride_b + kv_h_idx * v_stride_h;
    const fp16* v_column = v_head + d * v_stride_d;
    float sum = 0.0f;
    for (int begin = 0; begin < kv_len; begin += SLICE) {
        float part = 0.0f;
        for (int k = begin; k < min(begin + SLICE, kv_len); ++k)
            part = fmaf(p_row[k], to_float(v_column[k * v_stride_s]), part);
        sum += part;
    }
    fp16* o_row = O + b_idx * o_stride_b + h_idx * o_stride_h + q_idx * o_stride_s;
    o_row[d * o_stride_d] = to_fp16(sum);
}
