// alibi, naive, backward
// ======================
//
//     attention alibi {
//         dtype     fp16
//         head_dim  64
//         input     slopes: fp32[heads]
//         scale     0.125
//         mask      q >= k
//         score     s + slopes[h] * float(k - q)
//     }
//
// For batch b, query head h and query row q, with the key/value head h / group_size:
//
//     s    = 0.125 * sum over d of Q[q, d] * K[k, d]
//     S[k] = s + slopes[h] * float(k - q) where q >= k, else -inf
//     P[k] = exp(S[k]) / (sum over k of exp(S[k]))
//     dP[k] = (sum over d of dO[q, d] * V[k, d]) where q >= k, else 0
//     delta = sum over k of P[k] * dP[k]
//     dS[k] = P[k] * (dP[k] - delta)
//     dQ[d] = 0.125 * sum over k of dS[k] * K[k, d]
//     and for each key k of a key/value head, over the rows q of the query heads that share it:
//         dK[d] = 0.125 * sum over h, q of dS[q, k] * Q[q, d]
//         dV[d] = sum over h, q of P[q, k] * dO[q, d]
//     and added up over all b, h, q and, where it occurs, k:
//         d_slopes[h] += dS[q, k] * (float(k - q))
//
// Shapes
//     Q    fp16 [batch, q_heads, q_len, 64]
//     K    fp16 [batch, kv_heads, kv_len, 64]
//     V    fp16 [batch, kv_heads, kv_len, 64]
//     slopes fp32 [q_heads]
//     dO   fp16 [batch, q_heads, q_len, 64]
//     dQ   fp16 [batch, q_heads, q_len, 64], written
//     dK   fp16 [batch, kv_heads, kv_len, 64], written
//     dV   fp16 [batch, kv_heads, kv_len, 64], written
//     d_slopes fp32 [q_heads], written
//     S    fp32 [batch, q_heads, q_len, kv_len], workspace
//     dP   fp32 [batch, q_heads, q_len, kv_len], workspace
//     delta fp32 [batch, q_heads, q_len], workspace
//
// Plan, for sm_80 (Ampere: A100)
//     gradients = q, k, v, slopes: each by a kernel of its own: what is not wanted is not computed
//     weights = recomputed: by the kernels of the forward: nothing is saved between the two
//     THREADS = 128: enough warps to hide latency; the kernels share nothing between threads
//     THREADS_D = 64: the larger head size in whole warps
//     in global memory = S, dP, delta: O(q_len * kv_len) bytes, which fused schedules avoid
//     order of sums = fixed: a thread adds up one element by itself: the same bits in every run, no atomics
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. This variant's score and mask
//     4. Scores
//     5. Softmax
//     6. Gradients of the weights
//     7. Delta
//     8. Gradients of the scores
//     9. dQ
//     10. dK
//     11. dV
//     12. d_slopes

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;
constexpr float softmax_scale = 0.125f;
constexpr int THREADS = 128;
constexpr int THREADS_D = 64;  // the larger head size in whole warps
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

__device__ __forceinline__ float to_fp32(float x) { return x; }

// 3. This variant's score and mask

// Params and captured tensors: what the functions below read besides indices and sizes.
// A step is a stride in bytes. It is an int if its index differs between pairs: an address is then one multiply-add.
struct Captured {
    const float* slopes;  // fp32 [q_heads]
    long long slopes_step_0;
};

__device__ __forceinline__ float slopes_at(const Captured& in, int i0) {
    const char* at = (const char*)in.slopes + i0 * in.slopes_step_0;
    return *(const float*)at;
}

// S = s + slopes[h] * float(k - q)
__device__ __forceinline__ float score(const Captured& in, float s, int h_idx, int q_idx, int kv_idx) {
    return s + slopes_at(in, h_idx) * float(kv_idx - q_idx);
}

// d score / d slopes[h] = float(k - q)
__device__ __forceinline__ float slopes_factor(int q_idx, int kv_idx) {
    return float(kv_idx - q_idx);
}

// allowed: q >= k
__device__ __forceinline__ bool mask(int q_idx, int kv_idx) {
    return q_idx >= kv_idx;
}

// 4. Scores
//
//     S[q, k] = s + slopes[h] * float(k - q)  where q >= k, else -inf
//     with s = softmax_scale * sum over d of Q[q, d] * K[k, d]
//
// One thread computes one score.

extern "C" __global__ void __launch_bounds__(THREADS)
alibi_backward_scores(
    const fp16* __restrict__ Q,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ K,  // [batch, kv_heads, kv_len, 64]
    float* S,  // [batch, q_heads, q_len, kv_len]
    long long q_stride_b, long long q_stride_h, long long q_stride_s, long long q_stride_d,
    long long k_stride_b, long long k_stride_h, long long k_stride_s, long long k_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len,
    const float* __restrict__ captured_slopes,  // [q_heads]
    long long captured_slopes_step_0)
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
    const Captured in = {
        captured_slopes, captured_slopes_step_0
    };

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

    float s = dot * softmax_scale;
    s = score(in, s, h_idx, q_idx, kv_idx);
    const long long row = ((long long)b_idx * q_heads + h_idx) * q_len + q_idx;
    S[row * kv_len + kv_idx] = mask(q_idx, kv_idx) ? s : -INF;
}

// 5. Softmax
//
//     P[k] = exp(S[k]) / (sum over k of exp(S[k]))
//
// One thread computes one row, in place.

extern "C" __global__ void __launch_bounds__(THREADS)
alibi_backward_softmax(
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
    for (int k = 0; k < kv_len; ++k) row[k] = row[k] == -INF ? 0.0f : expf(row[k] - shift) / divisor;
}

// 6. Gradients of the weights
//
//     dP[q, k] = sum over d of dO[q, d] * V[k, d]   where q >= k, else 0
//
// One thread computes one element: the scores' product, with dO for Q and V for K.

extern "C" __global__ void __launch_bounds__(THREADS)
alibi_backward_weight_gradients(
    const fp16* __restrict__ dO,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ V,  // [batch, kv_heads, kv_len, 64]
    float* dP,  // [batch, q_heads, q_len, kv_len]
    long long do_stride_b, long long do_stride_h, long long do_stride_s, long long do_stride_d,
    long long v_stride_b, long long v_stride_h, long long v_stride_s, long long v_stride_d,
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

    const fp16* do_head = dO + b_idx * do_stride_b + h_idx * do_stride_h;
    const fp16* v_head = V + b_idx * v_stride_b + kv_h_idx * v_stride_h;
    const fp16* do_row = do_head + q_idx * do_stride_s;
    const fp16* v_row = v_head + kv_idx * v_stride_s;
    float dot = 0.0f;
    for (int begin = 0; begin < HEAD_DIM_V; begin += SLICE) {
        float part = 0.0f;
        for (int d = begin; d < min(begin + SLICE, HEAD_DIM_V); ++d)
            part = fmaf(to_float(do_row[d * do_stride_d]), to_float(v_row[d * v_stride_d]), part);
        dot += part;
    }

    const long long row = ((long long)b_idx * q_heads + h_idx) * q_len + q_idx;
    dP[row * kv_len + kv_idx] = mask(q_idx, kv_idx) ? dot : 0.0f;
}

// 7. Delta
//
//     delta = sum over k of P[k] * dP[k]
//
// One thread computes one row. A pair without weight is skipped, not multiplied: its dP may be NaN.

extern "C" __global__ void __launch_bounds__(THREADS)
alibi_backward_delta(
    const float* __restrict__ P,  // [batch, q_heads, q_len, kv_len]
    const float* __restrict__ dP,  // [batch, q_heads, q_len, kv_len]
    float* delta,  // [batch, q_heads, q_len]
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    const int q_blocks = (q_len + THREADS - 1) / THREADS;
    int block = blockIdx.x;
    const int q_idx = block % q_blocks * THREADS + threadIdx.x;
    block /= q_blocks;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    if (q_idx >= q_len) return;

    const long long row = ((long long)b_idx * q_heads + h_idx) * q_len + q_idx;
    const float* p_row = P + row * kv_len;
    const float* dp_row = dP + row * kv_len;
    float sum = 0.0f;
    for (int begin = 0; begin < kv_len; begin += SLICE) {
        float part = 0.0f;
        for (int k = begin; k < min(begin + SLICE, kv_len); ++k)
            if (p_row[k] != 0.0f) part = fmaf(p_row[k], dp_row[k], part);
        sum += part;
    }
    delta[row] = sum;
}

// 8. Gradients of the scores
//
//     dS[k] = P[k] * (dP[k] - delta)
//
// One thread computes one element, in the place of dP. A pair without weight or without gradient has none further on, whatever it is
// multiplied with.

extern "C" __global__ void __launch_bounds__(THREADS)
alibi_backward_score_gradients(
    const float* __restrict__ P,  // [batch, q_heads, q_len, kv_len]
    const float* __restrict__ delta,  // [batch, q_heads, q_len]
    float* dS,  // [batch, q_heads, q_len, kv_len]
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
    if (kv_idx >= kv_len) return;

    const long long row = ((long long)b_idx * q_heads + h_idx) * q_len + q_idx;
    const long long pair = row * kv_len + kv_idx;
    const float dp = dS[pair];
    const float p = P[pair];
    const float gradient = p == 0.0f ? 0.0f : p * (dp - delta[row]);
    dS[pair] = gradient;
}

// 9. dQ
//
//     dQ[q, d] = softmax_scale * sum over k of dS[q, k] * K[k, d]
//
// One block computes one row of dQ, one thread one element: the weighted sum of the forward, with dS for P and K for V.
// A pair whose dS is 0 is skipped, not multiplied: keys that the mask excludes may hold NaN.

extern "C" __global__ void __launch_bounds__(THREADS_D)
alibi_backward_dq(
    const float* __restrict__ dS,  // [batch, q_heads, q_len, kv_len]
    const fp16* __restrict__ K,  // [batch, kv_heads, kv_len, 64]
    fp16* dQ,  // [batch, q_heads, q_len, 64]
    long long k_stride_b, long long k_stride_h, long long k_stride_s, long long k_stride_d,
    long long dq_stride_b, long long dq_stride_h, long long dq_stride_s, long long dq_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    int block = blockIdx.x;
    const int q_idx = block % q_len;
    block /= q_len;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int d = threadIdx.x;
    if (d >= HEAD_DIM) return;

    const float* ds_row = dS + (((long long)b_idx * q_heads + h_idx) * q_len + q_idx) * kv_len;
    const fp16* k_head = K + b_idx * k_stride_b + kv_h_idx * k_stride_h;
    const fp16* k_column = k_head + d * k_stride_d;
    float sum = 0.0f;
    for (int begin = 0; begin < kv_len; begin += SLICE) {
        float part = 0.0f;
        for (int k = begin; k < min(begin + SLICE, kv_len); ++k)
            if (ds_row[k] != 0.0f) part = fmaf(ds_row[k], to_float(k_column[k * k_stride_s]), part);
        sum += part;
    }
    fp16* dq_row = dQ + b_idx * dq_stride_b + h_idx * dq_stride_h + q_idx * dq_stride_s;
    dq_row[d * dq_stride_d] = to_fp16(sum * softmax_scale);
}

// 10. dK
//
//     dK[k, d] = softmax_scale * sum over h, q of dS[h, q, k] * Q[h, q, d]
//
// One block computes one row of dK, one thread one element: the same with the transposed dS. The query heads that share the
// key/value head are added up in their order, so the result has the same bits in every run.

extern "C" __global__ void __launch_bounds__(THREADS_D)
alibi_backward_dk(
    const float* __restrict__ dS,  // [batch, q_heads, q_len, kv_len]
    const fp16* __restrict__ Q,  // [batch, q_heads, q_len, 64]
    fp16* dK,  // [batch, kv_heads, kv_len, 64]
    long long q_stride_b, long long q_stride_h, long long q_stride_s, long long q_stride_d,
    long long dk_stride_b, long long dk_stride_h, long long dk_stride_s, long long dk_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    int block = blockIdx.x;
    const int kv_idx = block % kv_len;
    block /= kv_len;
    const int kv_h_idx = block % kv_heads;
    const int b_idx = block / kv_heads;
    const int d = threadIdx.x;
    if (d >= HEAD_DIM) return;

    const int group_size = q_heads / kv_heads;
    float sum = 0.0f;
    for (int h = kv_h_idx * group_size; h < (kv_h_idx + 1) * group_size; ++h) {
        const float* ds_column = dS + ((long long)b_idx * q_heads + h) * q_len * kv_len + kv_idx;
        const fp16* q_column = Q + b_idx * q_stride_b + h * q_stride_h + d * q_stride_d;
        for (int begin = 0; begin < q_len; begin += SLICE) {
            float part = 0.0f;
            for (int q = begin; q < min(begin + SLICE, q_len); ++q) {
                const float factor = ds_column[(long long)q * kv_len];
                if (factor != 0.0f) part = fmaf(factor, to_float(q_column[q * q_stride_s]), part);
            }
            sum += part;
        }
    }
    fp16* dk_row = dK + b_idx * dk_stride_b + kv_h_idx * dk_stride_h + kv_idx * dk_stride_s;
    dk_row[d * dk_stride_d] = to_fp16(sum * softmax_scale);
}

// 11. dV
//
//     dV[k, d] = sum over h, q of P[h, q, k] * dO[h, q, d]
//
// One block computes one row of dV, one thread one element.

extern "C" __global__ void __launch_bounds__(THREADS_D)
alibi_backward_dv(
    const float* __restrict__ P,  // [batch, q_heads, q_len, kv_len]
    const fp16* __restrict__ dO,  // [batch, q_heads, q_len, 64]
    fp16* dV,  // [batch, kv_heads, kv_len, 64]
    long long do_stride_b, long long do_stride_h, long long do_stride_s, long long do_stride_d,
    long long dv_stride_b, long long dv_stride_h, long long dv_stride_s, long long dv_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    int block = blockIdx.x;
    const int kv_idx = block % kv_len;
    block /= kv_len;
    const int kv_h_idx = block % kv_heads;
    const int b_idx = block / kv_heads;
    const int d = threadIdx.x;
    if (d >= HEAD_DIM_V) return;

    const int group_size = q_heads / kv_heads;
    float sum = 0.0f;
    for (int h = kv_h_idx * group_size; h < (kv_h_idx + 1) * group_size; ++h) {
        const float* p_column = P + ((long long)b_idx * q_heads + h) * q_len * kv_len + kv_idx;
        const fp16* do_column = dO + b_idx * do_stride_b + h * do_stride_h + d * do_stride_d;
        for (int begin = 0; begin < q_len; begin += SLICE) {
            float part = 0.0f;
            for (int q = begin; q < min(begin + SLICE, q_len); ++q) {
                const float weight = p_column[(long long)q * kv_len];
                if (weight != 0.0f) part = fmaf(weight, to_float(do_column[q * do_stride_s]), part);
            }
            sum += part;
        }
    }
    fp16* dv_row = dV + b_idx * dv_stride_b + kv_h_idx * dv_stride_h + kv_idx * dv_stride_s;
    dv_row[d * dv_stride_d] = to_fp16(sum);
}

// 12. d_slopes
//
//     d_slopes[h] += dS[q, k] * (float(k - q))
//
// One thread computes one element, over the pairs that read it in a fixed order: the same bits in every run.

extern "C" __global__ void __launch_bounds__(THREADS)
alibi_backward_d_slopes(
    const float* __restrict__ dS,  // [batch, q_heads, q_len, kv_len]
    float* d_slopes,  // [q_heads]
    int d_slopes_size_0,
    long long d_slopes_stride_0,
    int batch, int q_heads, int kv_heads, int q_len, int kv_len)
{
    const int column = blockIdx.x * THREADS + threadIdx.x;
    const int i0 = column;
    if (column >= d_slopes_size_0) return;

    const int b_begin = 0, b_end = batch;
    const int h_begin = d_slopes_size_0 == 1 ? 0 : i0;
    const int h_end = d_slopes_size_0 == 1 ? q_heads : min(i0 + 1, q_heads);
    const int q_begin = 0, q_end = q_len;
    const int k_begin = 0, k_end = kv_len;
    double sum = 0.0;  // it has many terms, so fp64: each addition in fp32 would round
    for (int b_idx = b_begin; b_idx < b_end; ++b_idx)
        for (int h_idx = h_begin; h_idx < h_end; ++h_idx)
            for (int q_idx = q_begin; q_idx < q_end; ++q_idx) {
                const long long row = ((long long)b_idx * q_heads + h_idx) * q_len + q_idx;
                for (int kv_idx = k_begin; kv_idx < k_end; ++kv_idx) {
                    const long long pair = row * kv_len + kv_idx;
                    const float gradient = dS[pair];
                    if (gradient == 0.0f) continue;
                    sum += gradient * slopes_factor(q_idx, kv_idx);
                }
            }
    d_slopes[i0 * d_slopes_stride_0] = to_fp32((float)sum);
}
