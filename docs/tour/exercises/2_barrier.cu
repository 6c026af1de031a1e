// gpt2, tiled
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
//     S    fp32 [batch, q_heads, q_len, ceil(kv_len / 64), 64], workspace
//
// Plan, for sm_80 (Ampere: A100)
//     scores = in global memory: a softmax needs whole rows; the fused schedule avoids this
//     BLOCK_Q x BLOCK_KV = 64 x 64: a multiprocessor has registers for several blocks: some multiply while others
//         load or store
//     THREADS = 128: 16 x 8 threads, each with 4 x 8 scores, and 4 x 8 outputs, in registers: 12 floats from shared
//         memory make 32 products
//     SLICE = 16: a thread holds 16 numbers of the next slices
//     PAD = 8: floats after every 4 rows of a transposed tile: as many as a warp writes at once
//
// Sections
//     1. Numbers
//     2. Primitives
//     3. This variant's score and mask
//     4. Which tiles are visited
//     5. Loading tiles
//     6. Scores
//     7. Softmax
//     8. Weighted sum

// 1. Numbers

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;
constexpr float softmax_scale = 0.125f;
constexpr int BLOCK_Q = 64;  // query rows of a block
constexpr int BLOCK_KV = 64;  // keys of a tile
constexpr int BLOCK_DV = 64;  // dimensions of O of a block
constexpr int THREADS = 128;
constexpr int ROW_THREADS = 16;  // the block's threads as a grid over a tile: its rows
constexpr int COLUMN_THREADS = 8;  // and its columns
constexpr int ROWS = BLOCK_Q / ROW_THREADS;  // of a thread
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;  // keys of a thread in a tile
constexpr int DIMS = BLOCK_DV / COLUMN_THREADS;  // dimensions of O of a thread
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
gpt2_scores(
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
gpt2_softmax(
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
        for (int e = 0; e < 4; ++e) s.at[e] = expf(s.at[e] - shift) * inverse;
        *(Vector<float, 4>*)&row[k] = s;
    }
}

// 8. Weighted sum
//
//     O[q, d] = sum over k of P[q, k] * V[k, d]
//
// A block computes BLOCK_Q rows and BLOCK_DV dimensions of O, thread (ty, tx) the rows row_of(r) and the dimensions
// column_of(c) of them.

extern "C" __global__ void __launch_bounds__(THREADS)
gpt2_weighted_sum(
    const float* __restrict__ P,  // [batch, q_heads, q_len, ceil(kv_len / 64), 64]
    const fp16* __restrict__ V,  // [batch, kv_heads, kv_len, 64]
    fp16* O,  // [batch, q_heads, q_len, 64]
    long long v_stride_b, long long v_stride_h, long long v_stride_s, long long v_stride_d,
    long long o_stride_b, long long o_stride_h, long long o_stride_s, long long o_stride_d,
    int q_heads, int kv_heads, int q_len, int kv_len)
{
    __shared__ __align__(16) float P_smem[TRANSPOSED<BLOCK_Q>];
    __shared__ __align__(16) float V_smem[SLICE * BLOCK_DV];

    const int kv_blocks = (kv_len + BLOCK_KV - 1) / BLOCK_KV;
    const int d_blocks = (HEAD_DIM_V + BLOCK_DV - 1) / BLOCK_DV;
    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    int block = blockIdx.x;
    const int d_lo = block % d_blocks * BLOCK_DV;
    block /= d_blocks;
    const int q_block = q_blocks - 1 - block % q_blocks;  // under a causal mask the last rows have most to do: first
    block /= q_blocks;
    const int h_idx = block % q_heads;
    const int b_idx = block / q_heads;
    const int kv_h_idx = h_idx / (q_heads / kv_heads);
    const int q_lo = q_block * BLOCK_Q;
    const int tx = thread_column(), ty = thread_row();
    const auto row_of = [&](int r) { return spread(ty, ROW_THREADS, r); };  // where the elements of O_frag are
    const auto column_of = [&](int j) { return spread(tx, COLUMN_THREADS, j); };

    const int q_hi = min(q_lo + BLOCK_Q, q_len) - 1;
    const KvRange range = kv_range(q_lo, q_hi, kv_len);
    const int tile_end = (range.end + BLOCK_KV - 1) / BLOCK_KV;
    int tile = range.begin / BLOCK_KV;

    const fp16* v_head = V + b_idx * v_stride_b + kv_h_idx * v_stride_h;
    // this thread's first element of P and V in the slices that the block fetches
    const int p_stride_s = kv_blocks * BLOCK_KV;
    const float* p_mine = P + (((long long)b_idx * q_heads + h_idx) * q_len + q_lo) * p_stride_s;
    p_mine += my_first<SLICE>(p_stride_s, 1);
    const fp16* v_mine = v_head + d_lo * v_stride_d + my_first<BLOCK_DV>(v_stride_s, v_stride_d);
    const bool v_vectors = has_vectors(V, v_stride_b, v_stride_h, v_stride_s, v_stride_d);
    Vector<float, 4> p_share[SHARE<BLOCK_Q, SLICE>];
    Vector<fp16, 4> v_share[SHARE<SLICE, BLOCK_DV>];
    const auto fetch_from = [&](int k) {
        fetch_slice<BLOCK_Q, SLICE>(p_share, p_mine + k, p_stride_s, 1, true, q_len - q_lo);
        fetch_slice<SLICE, BLOCK_DV>(
            v_share, v_mine + k * v_stride_s, v_stride_s, v_stride_d, v_vectors,
            kv_len - k, HEAD_DIM_V - d_lo);
    };

    float O_frag[ROWS][DIMS] = {};
    if (tile < tile_end) fetch_from(tile * BLOCK_KV);
    while (tile < tile_end) {
        const int kv_lo = tile * BLOCK_KV;
        tile = tile + 1;

        // O += P V
        float part[ROWS][DIMS] = {};
#pragma unroll 1
        for (int begin = 0; begin < BLOCK_KV; begin += SLICE) {
            store_transposed<BLOCK_Q, SLICE>(P_smem, p_share);
            store_slice<SLICE, BLOCK_DV>(V_smem, v_share);
            __syncthreads();  // both slices are complete
            if (begin + SLICE < BLOCK_KV) fetch_from(kv_lo + begin + SLICE);
            else if (tile < tile_end) fetch_from(tile * BLOCK_KV);
#pragma unroll
            for (int k = 0; k < SLICE; ++k) {
                float p[ROWS], v[DIMS];
                read_spread(p, P_smem + transposed_at<BLOCK_Q>(k), ty, ROW_THREADS);
                read_spread(v, V_smem + k * BLOCK_DV, tx, COLUMN_THREADS);
                for (int r = 0; r < ROWS; ++r)
                    for (int c = 0; c < DIMS; ++c) part[r][c] = fmaf(p[r], v[c], part[r][c]);
            }
            __syncthreads();  // everyone is done: the next may take its place
        }
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < DIMS; ++c) O_frag[r][c] += part[r][c];
    }

    for (int r = 0; r < ROWS; ++r) {
        const int q_idx = q_lo + row_of(r);
        if (q_idx >= q_len) continue;
        fp16* o_row = O + b_idx * o_stride_b + h_idx * o_stride_h + q_idx * o_stride_s;
        for (int c = 0; c < DIMS; ++c) {
            const int d = d_lo + column_of(c);
            if (d < HEAD_DIM_V) o_row[d * o_stride_d] = to_fp16(O_frag[r][c]);
        }
    }
}
