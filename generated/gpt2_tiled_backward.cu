// gpt2, tiled, backward
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
//     dO   fp16 [batch, q_heads, q_len, 64]
//     dQ   fp16 [batch, q_heads, q_len, 64], written
//     dK   fp16 [batch, kv_heads, kv_len, 64], written
//     dV   fp16 [batch, kv_heads, kv_len, 64], written
//     S    fp32 [batch, q_heads, q_len, ceil(kv_len / 64), 64], workspace
//     dP   fp32 [batch, q_heads, q_len, ceil(kv_len / 64), 64], workspace
//     delta fp32 [batch, q_heads, q_len], workspace
//
// Plan, for sm_80 (Ampere: A100)
//     gradients = q, k, v: each by a kernel of its own: what is not wanted is not computed
//     weights = recomputed: by the kernels of the forward: nothing is saved between the two
//     in global memory = S, dP, delta: O(q_len * kv_len) bytes, which fused schedules avoid
//     BLOCK_Q x BLOCK_KV = 64 x 64: a multiprocessor has registers for several blocks: some multiply while others
//         load or store
//     BLOCK_D = 64: dimensions of a gradient of a block: as many as a tile has keys
//     THREADS = 128: 16 x 8 threads, each 4 x 8
//     SLICE = 16: a divisor of both head sizes
//     PAD = 8: floats after every 4 rows of a transposed tile: as many as a warp writes at once
//     order of sums = fixed: a block adds up alone what it owns: the same bits in every run, no atomics
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. This variant's score and mask
//     4. Which tiles are visited
//     5. Loading tiles
//     6. Scores
//     7. Softmax
//     8. Gradients of the weights
//     9. Delta
//     10. Gradients of the scores
//     11. dQ
//     12. dK
//     13. dV

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;
constexpr float softmax_scale = 0.125f;
constexpr int BLOCK_Q = 64;  // query rows of a block
constexpr int BLOCK_KV = 64;  // keys of a tile
constexpr int BLOCK_D = 64;  // dimensions of a gradient of a block
constexpr int THREADS = 128;
constexpr int ROW_THREADS = 16;  // the block's threads as a grid over a tile: its rows
constexpr int COLUMN_THREADS = 8;  // and its columns
constexpr int ROWS = BLOCK_Q / ROW_THREADS;  // of a thread
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;  // keys of a thread in a tile
constexpr int DIMS = BLOCK_D / COLUMN_THREADS;  // dimensions of O of a thread
constexpr int SLICE = 16;  // terms summed by themselves: rounding errors grow with the partial sums (Higham 1993)
constexpr int PAD = 8;  // floats after every fourth row of a transposed tile: what a warp writes lies in different banks
constexpr int WARPS = THREADS / 32;

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

__device__ __forceinline__ float to_float(float x) { return x; }

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
// A block multiplies slices of two matrices, SLICE terms of every sum, that lie in shared memory as fp32. Meanwhile its threads
// fetch the next slices into registers: it seldom waits for global memory. The terms of a slice of Q and K, and of a tile of P
// and V, are summed by themselves: rounding errors grow with the partial sums (Higham 1993).

template <typename T, int N> struct alignas(N * sizeof(T)) Vector { T at[N]; };

// Whether four neighbours of a row are one aligned vector in memory, in every row of `matrix`.
template <typename T>
__device__ __forceinline__ bool has_vectors(
    const T* matrix, long long stride_b, long long stride_h, long long stride_s, long long stride_d)
{
    return stride_d == 1 && (stride_b | stride_h | stride_s) % 4 == 0 && (unsigned long long)matrix % sizeof(Vector<T, 4>) == 0;
}

// A thread fetches four neighbours of every STEP-th row of a slice, always of the same columns.
template <int WIDTH> constexpr int STEP = THREADS / (WIDTH / 4);  // rows that the block fetches at once
template <int ROWS, int WIDTH> constexpr int SHARE = (ROWS + STEP<WIDTH> - 1) / STEP<WIDTH>;  // rows of a thread
template <int WIDTH> __device__ __forceinline__ int my_row() { return threadIdx.x / (WIDTH / 4); }
template <int WIDTH> __device__ __forceinline__ int my_column() { return threadIdx.x % (WIDTH / 4) * 4; }
template <int WIDTH> __device__ __forceinline__ long long my_first(long long row_stride, long long column_stride) {
    return my_row<WIDTH>() * row_stride + my_column<WIDTH>() * column_stride;
}

// This thread's share of a slice of a matrix, zero from row `rows` and from column `columns` on. `mine` is where its first
// element is, matrix + my_first; `vectors` is what has_vectors says of the matrix.
template <int ROWS, int WIDTH, typename T>
__device__ __forceinline__ void fetch_slice(
    Vector<T, 4> (&share)[(SHARE<ROWS, WIDTH>)], const T* mine, long long row_stride, long long column_stride, bool vectors,
    int rows, int columns = WIDTH)
{
#pragma unroll
    for (int n = 0; n < SHARE<ROWS, WIDTH>; ++n) {
        share[n] = {};
        if (my_row<WIDTH>() + n * STEP<WIDTH> < min(rows, ROWS) && my_column<WIDTH>() < columns) {
            if (vectors) share[n] = *(const Vector<T, 4>*)mine;
            else for (int e = 0; e < 4; ++e) share[n].at[e] = mine[e * column_stride];
        }
        mine += STEP<WIDTH> * row_stride;
    }
}

// tile[r][c] = slice[r][c], from the shares of all threads.
template <int ROWS, int WIDTH, typename T>
__device__ __forceinline__ void store_slice(float* tile, const Vector<T, 4> (&share)[SHARE<ROWS, WIDTH>]) {
#pragma unroll
    for (int n = 0; n < SHARE<ROWS, WIDTH>; ++n) {
        const int r = my_row<WIDTH>() + n * STEP<WIDTH>;
        Vector<float, 4> x;
        for (int e = 0; e < 4; ++e) x.at[e] = to_float(share[n].at[e]);
        if (r < ROWS) *(Vector<float, 4>*)&tile[r * WIDTH + my_column<WIDTH>()] = x;
    }
}

// Where row c of a transposed tile begins, and how many floats all of its rows take: PAD are left free after every fourth.
template <int ROWS> __device__ constexpr int transposed_at(int c) { return c * ROWS + c / 4 * PAD; }
template <int ROWS> constexpr int TRANSPOSED = transposed_at<ROWS>(SLICE);

// tile[c][r] = slice[r][c]: the terms of one step of all sums are neighbours.
template <int ROWS, int WIDTH, typename T>
__device__ __forceinline__ void store_transposed(float* tile, const Vector<T, 4> (&share)[SHARE<ROWS, WIDTH>]) {
#pragma unroll
    for (int n = 0; n < SHARE<ROWS, WIDTH>; ++n) {
        const int r = my_row<WIDTH>() + n * STEP<WIDTH>;
        if (r < ROWS)
            for (int e = 0; e < 4; ++e) tile[transposed_at<ROWS>(my_column<WIDTH>() + e) + r] = to_float(share[n].at[e]);
    }
}

// The threads as a grid of ROW_THREADS x COLUMN_THREADS over a tile, each warp 4 x 8 of them. Of a lane's neighbours l ^ 1 and
// l ^ 2 one is in its row and one in its column: so shared memory serves a warp that reads four floats a lane in two steps.
__device__ __forceinline__ int thread_row() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return warp / (COLUMN_THREADS / 8) * 4 + lane / 16 * 2 + lane / 2 % 2;
}
__device__ __forceinline__ int thread_column() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return warp % (COLUMN_THREADS / 8) * 8 + lane / 4 % 4 * 2 + lane % 2;
}

// Where the i-th element of thread `t` is among those of `threads` threads.
__device__ __forceinline__ int spread(int t, int threads, int i) { return i / 4 * threads * 4 + t * 4 + i % 4; }

// x[i] = line[spread(t, threads, i)]
template <int N> __device__ __forceinline__ void read_spread(float (&x)[N], const float* line, int t, int threads) {
    for (int i = 0; i < N; i += 4) {
        const Vector<float, 4> four = *(const Vector<float, 4>*)&line[spread(t, threads, i)];
        for (int e = 0; e < 4; ++e) x[i + e] = four.at[e];
    }
}

// 6. Scores
//
//     S[q, k] = s  where q >= k, else -inf
//     with s = softmax_scale * sum over d of Q[q, d] * K[k, d]
//
// A block computes a tile of S, thread (ty, tx) the rows row_of(r) and the keys column_of(j) of it. In memory a row of S is a
// whole number of tiles; what the mask leaves empty is neither written nor read.

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_backward_scores(
    const fp16* __restrict__ Q,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ K,  // [batch, kv_heads, kv_len, 64]
    float* S,  // [batch, q_heads, q_len, ceil(kv_len / 64), 64]
    long long q_stride_b, long long q_stride_h, long long q_stride_s, long long q_stride_d,
    long long k_stride_b, long long k_stride_h, long long k_stride_s, long long k_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    __shared__ __align__(16) float Q_smem[TRANSPOSED<BLOCK_Q>];
    __shared__ __align__(16) float K_smem[TRANSPOSED<BLOCK_KV>];

    const int kv_blocks = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    int block = blockIdx.x;
    const int tile = block % kv_blocks;
    block /= kv_blocks;
    const int q_block = block % q_blocks;
    block /= q_blocks;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int q_lo = q_block * BLOCK_Q;
    const int kv_lo = tile * BLOCK_KV;
    const int tx = thread_column(), ty = thread_row();
    const auto row_of = [&](int r) { return spread(ty, ROW_THREADS, r); };  // where the elements of S_frag are
    const auto column_of = [&](int j) { return spread(tx, COLUMN_THREADS, j); };

    const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
    const KvRange range = kv_range(q_lo, q_hi, kv_len);
    const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_begin = (range.full_begin + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_end = range.full_end / BLOCK_KV;
    if (tile < range.begin / BLOCK_KV || tile >= tile_end) return;

    const fp16* q_head = Q + b_idx * q_stride_b + h_idx * q_stride_h;
    const fp16* k_head = K + b_idx * k_stride_b + kv_h_idx * k_stride_h;
    // this thread's first element of Q and K in the slices that the block fetches
    const fp16* q_mine = q_head + q_lo * q_stride_s + my_first<SLICE>(q_stride_s, q_stride_d);
    const fp16* k_mine = k_head + kv_lo * k_stride_s + my_first<SLICE>(k_stride_s, k_stride_d);
    const bool q_vectors = has_vectors(Q, q_stride_b, q_stride_h, q_stride_s, q_stride_d);
    const bool k_vectors = has_vectors(K, k_stride_b, k_stride_h, k_stride_s, k_stride_d);
    Vector<fp16, 4> q_share[SHARE<BLOCK_Q, SLICE>], k_share[SHARE<BLOCK_KV, SLICE>];
    const auto fetch_next = [&] {
        fetch_slice<BLOCK_Q, SLICE>(q_share, q_mine, q_stride_s, q_stride_d, q_vectors, q_len - q_lo);
        fetch_slice<BLOCK_KV, SLICE>(k_share, k_mine, k_stride_s, k_stride_d, k_vectors, kv_len - kv_lo);
        k_mine += SLICE * k_stride_d;
        q_mine += SLICE * q_stride_d;
    };

    // S = Q K^T
    float S_frag[ROWS][COLUMNS] = {};
    fetch_next();
#pragma unroll 1
    for (int begin = 0; begin < HEAD_DIM; begin += SLICE) {
        store_transposed<BLOCK_Q, SLICE>(Q_smem, q_share);
        store_transposed<BLOCK_KV, SLICE>(K_smem, k_share);
        __syncthreads();  // both slices are complete
        if (begin + SLICE < HEAD_DIM) fetch_next();
        float part[ROWS][COLUMNS] = {};
#pragma unroll
        for (int d = 0; d < SLICE; ++d) {
            float q[ROWS], k[COLUMNS];
            read_spread(q, Q_smem + transposed_at<BLOCK_Q>(d), ty, ROW_THREADS);
            read_spread(k, K_smem + transposed_at<BLOCK_KV>(d), tx, COLUMN_THREADS);
            for (int r = 0; r < ROWS; ++r)
                for (int j = 0; j < COLUMNS; ++j) part[r][j] = fmaf(q[r], k[j], part[r][j]);
        }
        for (int r = 0; r < ROWS; ++r)
            for (int j = 0; j < COLUMNS; ++j) S_frag[r][j] += part[r][j];
        __syncthreads();  // everyone is done: the next may take its place
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
    for (int r = 0; r < ROWS; ++r) {
        const int q_idx = q_lo + row_of(r);
        if (q_idx >= q_len) continue;
        const long long row = ((long long)b_idx * q_heads + h_idx) * q_len + q_idx;
        Vector<float, 4>* s_row = (Vector<float, 4>*)&S[row * kv_blocks * BLOCK_KV + kv_lo];
        for (int j = 0; j < COLUMNS; j += 4) {
            Vector<float, 4> s;
            for (int e = 0; e < 4; ++e) s.at[e] = S_frag[r][j + e];
            s_row[column_of(j) / 4] = s;
        }
    }
}

// 7. Softmax
//
//     P[k] = exp(S[k]) / (sum over k of exp(S[k]))
//
// One block computes one row, in place, a thread four neighbouring keys at a time.

// Sets a row's maximum to `new_max`, which is at least the old one, and `alpha` to exp(old - new), by which sums under the old
// maximum must be multiplied. Returns the maximum to subtract from scores.
__device__ __forceinline__ float raise_max(float& row_max, float& alpha, float new_max) {
    const float shift = new_max == -INF ? 0.0f : new_max;  // no key yet: exp(-inf - 0) = 0, not NaN
    alpha = expf(row_max - shift);
    row_max = new_max;
    return shift;
}

// `x` of all threads combined, known to all of them. `scratch` holds one value a warp.
template <typename Combine> __device__ __forceinline__ float block_reduce(float x, float (&scratch)[WARPS], Combine combine) {
    x = lane_reduce<32>(x, combine);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();  // every warp's value is there
    float all = scratch[0];
    for (int warp = 1; warp < WARPS; ++warp) all = combine(all, scratch[warp]);
    return all;
}

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_backward_softmax(
    float* S,  // [batch, q_heads, q_len, ceil(kv_len / 64), 64]
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    __shared__ float max_smem[WARPS];
    __shared__ float sum_smem[WARPS];

    const int kv_blocks = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    int block = blockIdx.x;
    const int q_idx = block % q_len;
    block /= q_len;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int q_block = q_idx / BLOCK_Q, q_lo = q_block * BLOCK_Q;

    const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
    const KvRange range = kv_range(q_lo, q_hi, kv_len);
    const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
    float* row = S + (((long long)b_idx * q_heads + h_idx) * q_len + q_idx) * kv_blocks * BLOCK_KV;
    const int first = range.begin / BLOCK_KV * BLOCK_KV + threadIdx.x * 4, end = tile_end * BLOCK_KV;  // this thread's keys

    // online softmax: what was summed is rescaled whenever the maximum grows
    float row_max = -INF;
    float row_sum = 0.0f;
#pragma unroll 4
    for (int k = first; k < end; k += THREADS * 4) {
        const Vector<float, 4> s = *(const Vector<float, 4>*)&row[k];
        const float new_max = fmaxf(row_max, fmaxf(fmaxf(s.at[0], s.at[1]), fmaxf(s.at[2], s.at[3])));
        float alpha;
        const float shift = raise_max(row_max, alpha, new_max);
        row_sum *= alpha;
        for (int e = 0; e < 4; ++e) row_sum += expf(s.at[e] - shift);
    }

    // of all threads
    const float thread_max = row_max;
    row_max = block_reduce(row_max, max_smem, [](float a, float b) { return fmaxf(a, b); });
    const float shift = row_max == -INF ? 0.0f : row_max;  // a row with no key: exp(-inf - 0) = 0, not NaN
    row_sum *= expf(thread_max - shift);
    row_sum = block_reduce(row_sum, sum_smem, [](float a, float b) { return a + b; });

    const float divisor = row_sum == 0.0f ? 1.0f : row_sum;
    const float inverse = 1.0f / divisor;
#pragma unroll 4
    for (int k = first; k < end; k += THREADS * 4) {
        Vector<float, 4> s = *(const Vector<float, 4>*)&row[k];
        for (int e = 0; e < 4; ++e) s.at[e] = s.at[e] == -INF ? 0.0f : expf(s.at[e] - shift) * inverse;
        *(Vector<float, 4>*)&row[k] = s;
    }
}

// 8. Gradients of the weights
//
//     dP[q, k] = sum over d of dO[q, d] * V[k, d]   where q >= k, else 0
//
// A block computes a tile of dP: the product of the scores, with dO for Q and V for K.

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_backward_weight_gradients(
    const fp16* __restrict__ dO,  // [batch, q_heads, q_len, 64]
    const fp16* __restrict__ V,  // [batch, kv_heads, kv_len, 64]
    float* dP,  // [batch, q_heads, q_len, ceil(kv_len / 64), 64]
    long long do_stride_b, long long do_stride_h, long long do_stride_s, long long do_stride_d,
    long long v_stride_b, long long v_stride_h, long long v_stride_s, long long v_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    __shared__ __align__(16) float dO_smem[TRANSPOSED<BLOCK_Q>];
    __shared__ __align__(16) float V_smem[TRANSPOSED<BLOCK_KV>];

    const int kv_blocks = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    int block = blockIdx.x;
    const int tile = block % kv_blocks;
    block /= kv_blocks;
    const int q_block = block % q_blocks;
    block /= q_blocks;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int q_lo = q_block * BLOCK_Q;
    const int kv_lo = tile * BLOCK_KV;
    const int tx = thread_column(), ty = thread_row();
    const auto row_of = [&](int r) { return spread(ty, ROW_THREADS, r); };  // where the elements of S_frag are
    const auto column_of = [&](int j) { return spread(tx, COLUMN_THREADS, j); };

    const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
    const KvRange range = kv_range(q_lo, q_hi, kv_len);
    const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_begin = (range.full_begin + BLOCK_KV - 1) / BLOCK_KV;
    const int full_tile_end = range.full_end / BLOCK_KV;
    if (tile < range.begin / BLOCK_KV || tile >= tile_end) return;

    const fp16* do_head = dO + b_idx * do_stride_b + h_idx * do_stride_h;
    const fp16* v_head = V + b_idx * v_stride_b + kv_h_idx * v_stride_h;
    // this thread's first element of dO and V in the slices that the block fetches
    const fp16* do_mine = do_head + q_lo * do_stride_s + my_first<SLICE>(do_stride_s, do_stride_d);
    const fp16* v_mine = v_head + kv_lo * v_stride_s + my_first<SLICE>(v_stride_s, v_stride_d);
    const bool do_vectors = has_vectors(dO, do_stride_b, do_stride_h, do_stride_s, do_stride_d);
    const bool v_vectors = has_vectors(V, v_stride_b, v_stride_h, v_stride_s, v_stride_d);
    Vector<fp16, 4> do_share[SHARE<BLOCK_Q, SLICE>], v_share[SHARE<BLOCK_KV, SLICE>];
    const auto fetch_next = [&] {
        fetch_slice<BLOCK_Q, SLICE>(do_share, do_mine, do_stride_s, do_stride_d, do_vectors, q_len - q_lo);
        fetch_slice<BLOCK_KV, SLICE>(v_share, v_mine, v_stride_s, v_stride_d, v_vectors, kv_len - kv_lo);
        v_mine += SLICE * v_stride_d;
        do_mine += SLICE * do_stride_d;
    };

    // dP = dO V^T
    float dP_frag[ROWS][COLUMNS] = {};
    fetch_next();
#pragma unroll 1
    for (int begin = 0; begin < HEAD_DIM_V; begin += SLICE) {
        store_transposed<BLOCK_Q, SLICE>(dO_smem, do_share);
        store_transposed<BLOCK_KV, SLICE>(V_smem, v_share);
        __syncthreads();  // both slices are complete
        if (begin + SLICE < HEAD_DIM_V) fetch_next();
        float part[ROWS][COLUMNS] = {};
#pragma unroll
        for (int d = 0; d < SLICE; ++d) {
            float grad[ROWS], v[COLUMNS];
            read_spread(grad, dO_smem + transposed_at<BLOCK_Q>(d), ty, ROW_THREADS);
            read_spread(v, V_smem + transposed_at<BLOCK_KV>(d), tx, COLUMN_THREADS);
            for (int r = 0; r < ROWS; ++r)
                for (int j = 0; j < COLUMNS; ++j) part[r][j] = fmaf(grad[r], v[j], part[r][j]);
        }
        for (int r = 0; r < ROWS; ++r)
            for (int j = 0; j < COLUMNS; ++j) dP_frag[r][j] += part[r][j];
        __syncthreads();  // everyone is done: the next may take its place
    }

    const bool partial = tile < full_tile_begin || tile >= full_tile_end;
    if (partial) {  // the pairs that the mask forbids, and keys past the end
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const int q_idx = q_lo + row_of(r);
                const int kv_idx = kv_lo + column_of(j);
                const bool allowed = mask(q_idx, kv_idx);
                if (kv_idx >= kv_len || !allowed) dP_frag[r][j] = 0.0f;
            }
    }

    for (int r = 0; r < ROWS; ++r) {
        const int q_idx = q_lo + row_of(r);
        if (q_idx >= q_len) continue;
        const long long row = ((long long)b_idx * q_heads + h_idx) * q_len + q_idx;
        Vector<float, 4>* s_row = (Vector<float, 4>*)&dP[row * kv_blocks * BLOCK_KV + kv_lo];
        for (int j = 0; j < COLUMNS; j += 4) {
            Vector<float, 4> s;
            for (int e = 0; e < 4; ++e) s.at[e] = dP_frag[r][j + e];
            s_row[column_of(j) / 4] = s;
        }
    }

}

// 9. Delta
//
//     delta = sum over k of P[k] * dP[k]
//
// One block computes one row, a thread four neighbouring keys at a time. A pair without weight is skipped, not multiplied: its dP
// may be NaN.

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_backward_delta(
    const float* __restrict__ P,  // [batch, q_heads, q_len, ceil(kv_len / 64), 64]
    const float* __restrict__ dP,  // [batch, q_heads, q_len, ceil(kv_len / 64), 64]
    float* delta,  // [batch, q_heads, q_len]
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    __shared__ float sum_smem[WARPS];

    const int kv_blocks = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    int block = blockIdx.x;
    const int q_idx = block % q_len;
    block /= q_len;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int q_block = q_idx / BLOCK_Q, q_lo = q_block * BLOCK_Q;

    const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
    const KvRange range = kv_range(q_lo, q_hi, kv_len);
    const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
    const long long row = ((long long)b_idx * q_heads + h_idx) * q_len + q_idx;
    const long long row_begin = row * kv_blocks * BLOCK_KV;
    // of this thread's keys
    const int first = range.begin / BLOCK_KV * BLOCK_KV + threadIdx.x * 4, end = tile_end * BLOCK_KV;

    float sum = 0.0f;
    for (int k = first; k < end; k += THREADS * 4) {
        const Vector<float, 4> p = *(const Vector<float, 4>*)&P[row_begin + k];
        const Vector<float, 4> dp = *(const Vector<float, 4>*)&dP[row_begin + k];
        for (int e = 0; e < 4; ++e)
            if (p.at[e] != 0.0f) sum = fmaf(p.at[e], dp.at[e], sum);
    }
    sum = block_reduce(sum, sum_smem, [](float a, float b) { return a + b; });
    if (threadIdx.x == 0) delta[row] = sum;
}

// 10. Gradients of the scores
//
//     dS[k] = P[k] * (dP[k] - delta)
//
// One block computes one row, in the place of dP, a thread four neighbouring keys at a time.

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_backward_score_gradients(
    const float* __restrict__ P,  // [batch, q_heads, q_len, ceil(kv_len / 64), 64]
    const float* __restrict__ delta,  // [batch, q_heads, q_len]
    float* dS,  // [batch, q_heads, q_len, ceil(kv_len / 64), 64]
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    const int kv_blocks = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    int block = blockIdx.x;
    const int q_idx = block % q_len;
    block /= q_len;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int q_block = q_idx / BLOCK_Q, q_lo = q_block * BLOCK_Q;

    const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
    const KvRange range = kv_range(q_lo, q_hi, kv_len);
    const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
    const long long row = ((long long)b_idx * q_heads + h_idx) * q_len + q_idx;
    const long long row_begin = row * kv_blocks * BLOCK_KV;
    // of this thread's keys
    const int first = range.begin / BLOCK_KV * BLOCK_KV + threadIdx.x * 4, end = tile_end * BLOCK_KV;

    for (int k = first; k < end; k += THREADS * 4) {
        Vector<float, 4> gradients = {};
        for (int e = 0; e < 4; ++e) {
            const int kv_idx = k + e;
            const long long pair = row_begin + kv_idx;
            if (P[pair] != 0.0f) gradients.at[e] = P[pair] * (dS[pair] - delta[row]);
        }
        *(Vector<float, 4>*)&dS[row_begin + k] = gradients;
    }
}

// 11. dQ
//
//     dQ[q, d] = softmax_scale * sum over k of dS[q, k] * K[k, d]
//
// The weighted sum of the forward, with dS for P and K for V: a block computes BLOCK_Q rows and BLOCK_D dimensions of dQ.

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_backward_dq(
    const float* __restrict__ dS,  // [batch, q_heads, q_len, ceil(kv_len / 64), 64]
    const fp16* __restrict__ K,  // [batch, kv_heads, kv_len, 64]
    fp16* dQ,  // [batch, q_heads, q_len, 64]
    long long k_stride_b, long long k_stride_h, long long k_stride_s, long long k_stride_d,
    long long dq_stride_b, long long dq_stride_h, long long dq_stride_s, long long dq_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    __shared__ __align__(16) float dS_smem[TRANSPOSED<BLOCK_Q>];
    __shared__ __align__(16) float K_smem[SLICE * BLOCK_D];

    const int kv_blocks = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    const int d_blocks = (HEAD_DIM + BLOCK_D - 1) / BLOCK_D;
    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    int block = blockIdx.x;
    const int d_lo = block % d_blocks * BLOCK_D;
    block /= d_blocks;
    const int q_block = q_blocks - 1 - block % q_blocks;  // under a causal mask the last rows have most to do: first
    block /= q_blocks;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int q_lo = q_block * BLOCK_Q;
    const int tx = thread_column(), ty = thread_row();
    const auto row_of = [&](int r) { return spread(ty, ROW_THREADS, r); };  // where the elements of dQ_frag are
    const auto column_of = [&](int j) { return spread(tx, COLUMN_THREADS, j); };

    const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
    const KvRange range = kv_range(q_lo, q_hi, kv_len);
    const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
    int tile = range.begin / BLOCK_KV;

    const fp16* k_head = K + b_idx * k_stride_b + kv_h_idx * k_stride_h;
    // this thread's first element of dS and K in the slices that the block fetches
    const int ds_stride_s = kv_blocks * BLOCK_KV;
    const float* ds_mine = dS + (((long long)b_idx * q_heads + h_idx) * q_len + q_lo) * ds_stride_s;
    ds_mine += my_first<SLICE>(ds_stride_s, 1);
    const fp16* k_mine = k_head + d_lo * k_stride_d + my_first<BLOCK_D>(k_stride_s, k_stride_d);
    const bool k_vectors = has_vectors(K, k_stride_b, k_stride_h, k_stride_s, k_stride_d);
    Vector<float, 4> ds_share[SHARE<BLOCK_Q, SLICE>];
    Vector<fp16, 4> k_share[SHARE<SLICE, BLOCK_D>];
    const auto fetch_from = [&](int k) {
        fetch_slice<BLOCK_Q, SLICE>(ds_share, ds_mine + k, ds_stride_s, 1, true, q_len - q_lo);
        fetch_slice<SLICE, BLOCK_D>(
            k_share, k_mine + k * k_stride_s, k_stride_s, k_stride_d, k_vectors,
            kv_len - k, HEAD_DIM - d_lo);
    };

    float dQ_frag[ROWS][DIMS] = {};
    if (tile < tile_end) fetch_from(tile * BLOCK_KV);
    while (tile < tile_end) {
        const int kv_lo = tile * BLOCK_KV;
        tile = tile + 1;

        // dQ += dS K
        float part[ROWS][DIMS] = {};
#pragma unroll 1
        for (int begin = 0; begin < BLOCK_KV; begin += SLICE) {
            store_transposed<BLOCK_Q, SLICE>(dS_smem, ds_share);
            store_slice<SLICE, BLOCK_D>(K_smem, k_share);
            __syncthreads();  // both slices are complete
            if (begin + SLICE < BLOCK_KV) fetch_from(kv_lo + begin + SLICE);
            else if (tile < tile_end) fetch_from(tile * BLOCK_KV);
#pragma unroll
            for (int k = 0; k < SLICE; ++k) {
                float w[ROWS], x[DIMS];
                read_spread(w, dS_smem + transposed_at<BLOCK_Q>(k), ty, ROW_THREADS);
                read_spread(x, K_smem + k * BLOCK_D, tx, COLUMN_THREADS);
                for (int r = 0; r < ROWS; ++r)
                    if (w[r] != 0.0f)  // the key of a pair that is excluded may have NaN
                        for (int c = 0; c < DIMS; ++c) part[r][c] = fmaf(w[r], x[c], part[r][c]);
            }
            __syncthreads();  // everyone is done: the next may take its place
        }
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < DIMS; ++c) dQ_frag[r][c] += part[r][c];
    }

    for (int r = 0; r < ROWS; ++r) {
        const int q_idx = q_lo + row_of(r);
        if (q_idx >= q_len) continue;
        fp16* dq_row = dQ + b_idx * dq_stride_b + h_idx * dq_stride_h + q_idx * dq_stride_s;
        for (int c = 0; c < DIMS; ++c) {
            const int d = d_lo + column_of(c);
            if (d < HEAD_DIM) dq_row[d * dq_stride_d] = to_fp16(dQ_frag[r][c] * softmax_scale);
        }
    }
}

// 12. dK
//
//     dK[k, d] = softmax_scale * sum over h, q of dS[h, q, k] * Q[h, q, d]
//
// A block computes BLOCK_KV keys and BLOCK_D dimensions of dK, over the rows of all query heads that share the key/value head, in
// their order.

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_backward_dk(
    const float* __restrict__ dS,  // [batch, q_heads, q_len, ceil(kv_len / 64), 64]
    const fp16* __restrict__ Q,  // [batch, q_heads, q_len, 64]
    fp16* dK,  // [batch, kv_heads, kv_len, 64]
    long long q_stride_b, long long q_stride_h, long long q_stride_s, long long q_stride_d,
    long long dk_stride_b, long long dk_stride_h, long long dk_stride_s, long long dk_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    __shared__ __align__(16) float dS_smem[SLICE * BLOCK_KV];
    __shared__ __align__(16) float Q_smem[SLICE * BLOCK_D];

    const int kv_blocks = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    const int d_blocks = (HEAD_DIM + BLOCK_D - 1) / BLOCK_D;
    int block = blockIdx.x;
    const int d_lo = block % d_blocks * BLOCK_D;
    block /= d_blocks;
    const int tile = block % kv_blocks;  // under a causal mask the first keys have most to do: first
    block /= kv_blocks;
    const int kv_h_idx = block % kv_heads;
    const int b_idx = block / kv_heads;
    const int group_size = q_heads / kv_heads;
    const int own_lo = tile * BLOCK_KV;
    const int tx = thread_column(), ty = thread_row();
    const auto row_of = [&](int r) { return spread(ty, ROW_THREADS, r); };  // keys: as many as a block has rows elsewhere
    const auto column_of = [&](int j) { return spread(tx, COLUMN_THREADS, j); };

    const int pair_stride = kv_blocks * BLOCK_KV;
    const bool vectors = has_vectors(Q, q_stride_b, q_stride_h, q_stride_s, q_stride_d);
    Vector<float, 4> weights_share[SHARE<SLICE, BLOCK_KV>];
    Vector<fp16, 4> rows_share[SHARE<SLICE, BLOCK_D>];
    float sum[ROWS][DIMS] = {};
    for (int h_idx = kv_h_idx * group_size; h_idx < (kv_h_idx + 1) * group_size; ++h_idx) {
        const fp16* q_head = Q + b_idx * q_stride_b + h_idx * q_stride_h;
        // this thread's first element of both matrices in the slices that the block fetches
        const float* weights_mine = dS + ((long long)b_idx * q_heads + h_idx) * q_len * pair_stride + own_lo;
        weights_mine += my_first<BLOCK_KV>(pair_stride, 1);
        const fp16* rows_mine = q_head + d_lo * q_stride_d + my_first<BLOCK_D>(q_stride_s, q_stride_d);
        const auto fetch_from = [&](int q) {
            fetch_slice<SLICE, BLOCK_KV>(weights_share, weights_mine + (long long)q * pair_stride, pair_stride, 1, true, q_len - q);
            fetch_slice<SLICE, BLOCK_D>(rows_share, rows_mine + q * q_stride_s, q_stride_s, q_stride_d, vectors,
                                        q_len - q, HEAD_DIM - d_lo);
        };
        for (int q_block = 0; q_block < q_blocks; ++q_block) {
            const int q_lo = q_block * BLOCK_Q;
            const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
            const KvRange range = kv_range(q_lo, q_hi, kv_len);
            const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;

            if (tile < range.begin / BLOCK_KV || tile >= tile_end) continue;  // not written

            // sum += dS^T Q
            fetch_from(q_lo);
            float part[ROWS][DIMS] = {};
#pragma unroll 1
            for (int begin = 0; begin < BLOCK_Q; begin += SLICE) {
                store_slice<SLICE, BLOCK_KV>(dS_smem, weights_share);
                store_slice<SLICE, BLOCK_D>(Q_smem, rows_share);
                __syncthreads();  // both slices are complete
                if (begin + SLICE < BLOCK_Q) fetch_from(q_lo + begin + SLICE);
#pragma unroll
                for (int i = 0; i < SLICE; ++i) {
                    float w[ROWS], x[DIMS];
                    read_spread(w, dS_smem + i * BLOCK_KV, ty, ROW_THREADS);
                    read_spread(x, Q_smem + i * BLOCK_D, tx, COLUMN_THREADS);
                    for (int r = 0; r < ROWS; ++r)
                        if (w[r] != 0.0f)  // the row of a pair that is excluded may have NaN
                            for (int c = 0; c < DIMS; ++c) part[r][c] = fmaf(w[r], x[c], part[r][c]);
                }
                __syncthreads();  // everyone is done: the next may take its place
            }
            for (int r = 0; r < ROWS; ++r)
                for (int c = 0; c < DIMS; ++c) sum[r][c] += part[r][c];
        }
    }

    for (int r = 0; r < ROWS; ++r) {
        const int kv_idx = own_lo + row_of(r);
        if (kv_idx >= kv_len) continue;
        fp16* dk_row = dK + b_idx * dk_stride_b + kv_h_idx * dk_stride_h + kv_idx * dk_stride_s;
        for (int c = 0; c < DIMS; ++c) {
            const int d = d_lo + column_of(c);
            if (d < HEAD_DIM) dk_row[d * dk_stride_d] = to_fp16(sum[r][c] * softmax_scale);
        }
    }
}

// 13. dV
//
//     dV[k, d] = sum over h, q of P[h, q, k] * dO[h, q, d]
//
// The same sum, of P and dO.

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_backward_dv(
    const float* __restrict__ P,  // [batch, q_heads, q_len, ceil(kv_len / 64), 64]
    const fp16* __restrict__ dO,  // [batch, q_heads, q_len, 64]
    fp16* dV,  // [batch, kv_heads, kv_len, 64]
    long long do_stride_b, long long do_stride_h, long long do_stride_s, long long do_stride_d,
    long long dv_stride_b, long long dv_stride_h, long long dv_stride_s, long long dv_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    __shared__ __align__(16) float P_smem[SLICE * BLOCK_KV];
    __shared__ __align__(16) float dO_smem[SLICE * BLOCK_D];

    const int kv_blocks = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    const int d_blocks = (HEAD_DIM_V + BLOCK_D - 1) / BLOCK_D;
    int block = blockIdx.x;
    const int d_lo = block % d_blocks * BLOCK_D;
    block /= d_blocks;
    const int tile = block % kv_blocks;  // under a causal mask the first keys have most to do: first
    block /= kv_blocks;
    const int kv_h_idx = block % kv_heads;
    const int b_idx = block / kv_heads;
    const int group_size = q_heads / kv_heads;
    const int own_lo = tile * BLOCK_KV;
    const int tx = thread_column(), ty = thread_row();
    const auto row_of = [&](int r) { return spread(ty, ROW_THREADS, r); };  // keys: as many as a block has rows elsewhere
    const auto column_of = [&](int j) { return spread(tx, COLUMN_THREADS, j); };

    const int pair_stride = kv_blocks * BLOCK_KV;
    const bool vectors = has_vectors(dO, do_stride_b, do_stride_h, do_stride_s, do_stride_d);
    Vector<float, 4> weights_share[SHARE<SLICE, BLOCK_KV>];
    Vector<fp16, 4> rows_share[SHARE<SLICE, BLOCK_D>];
    float sum[ROWS][DIMS] = {};
    for (int h_idx = kv_h_idx * group_size; h_idx < (kv_h_idx + 1) * group_size; ++h_idx) {
        const fp16* do_head = dO + b_idx * do_stride_b + h_idx * do_stride_h;
        // this thread's first element of both matrices in the slices that the block fetches
        const float* weights_mine = P + ((long long)b_idx * q_heads + h_idx) * q_len * pair_stride + own_lo;
        weights_mine += my_first<BLOCK_KV>(pair_stride, 1);
        const fp16* rows_mine = do_head + d_lo * do_stride_d + my_first<BLOCK_D>(do_stride_s, do_stride_d);
        const auto fetch_from = [&](int q) {
            fetch_slice<SLICE, BLOCK_KV>(weights_share, weights_mine + (long long)q * pair_stride, pair_stride, 1, true, q_len - q);
            fetch_slice<SLICE, BLOCK_D>(rows_share, rows_mine + q * do_stride_s, do_stride_s, do_stride_d, vectors,
                                        q_len - q, HEAD_DIM_V - d_lo);
        };
        for (int q_block = 0; q_block < q_blocks; ++q_block) {
            const int q_lo = q_block * BLOCK_Q;
            const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
            const KvRange range = kv_range(q_lo, q_hi, kv_len);
            const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;

            if (tile < range.begin / BLOCK_KV || tile >= tile_end) continue;  // not written

            // sum += P^T dO
            fetch_from(q_lo);
            float part[ROWS][DIMS] = {};
#pragma unroll 1
            for (int begin = 0; begin < BLOCK_Q; begin += SLICE) {
                store_slice<SLICE, BLOCK_KV>(P_smem, weights_share);
                store_slice<SLICE, BLOCK_D>(dO_smem, rows_share);
                __syncthreads();  // both slices are complete
                if (begin + SLICE < BLOCK_Q) fetch_from(q_lo + begin + SLICE);
#pragma unroll
                for (int i = 0; i < SLICE; ++i) {
                    float w[ROWS], x[DIMS];
                    read_spread(w, P_smem + i * BLOCK_KV, ty, ROW_THREADS);
                    read_spread(x, dO_smem + i * BLOCK_D, tx, COLUMN_THREADS);
                    for (int r = 0; r < ROWS; ++r)
                        if (w[r] != 0.0f)  // the row of a pair that is excluded may have NaN
                            for (int c = 0; c < DIMS; ++c) part[r][c] = fmaf(w[r], x[c], part[r][c]);
                }
                __syncthreads();  // everyone is done: the next may take its place
            }
            for (int r = 0; r < ROWS; ++r)
                for (int c = 0; c < DIMS; ++c) sum[r][c] += part[r][c];
        }
    }

    for (int r = 0; r < ROWS; ++r) {
        const int kv_idx = own_lo + row_of(r);
        if (kv_idx >= kv_len) continue;
        fp16* dv_row = dV + b_idx * dv_stride_b + kv_h_idx * dv_stride_h + kv_idx * dv_stride_s;
        for (int c = 0; c < DIMS; ++c) {
            const int d = d_lo + column_of(c);
            if (d < HEAD_DIM_V) dv_row[d * dv_stride_d] = to_fp16(sum[r][c]);
        }
    }
}
