// append_to_pages_bf16_128_rotary_128
// ===================================
//
// New rows of K and V are appended to a cache.
// K is rotated on the way, and so is Q.
// For batch b, head h and new row i:
//
//     position = lengths[b] + i
//     K_cache[place(b, position), h] = rotated(K[b, i, h], position)
//     V_cache[place(b, position), h] = V[b, i, h]
//     Q_rotated[b, row, h] = rotated(Q[b, row, h], begin + new_len - q_len + row)   with begin = lengths[b]
//     lengths_after[b] = lengths[b] + new_len
//
// place(b, position) is row position % page_size of page page_table[b, position / page_size].
// Rows for which the cache has no room are not written. A position past the last angle uses the last one.
//
// Shapes
//     K    bf16 [batch, new_len, kv_heads, 128]
//     V    bf16 [batch, new_len, kv_heads, 128]
//     lengths int32 [batch]
//     page_table int32 [batch, max_pages]
//     cosines fp32 [angles, 64]
//     sines fp32 [angles, 64]
//     Q    bf16 [batch, q_len, q_heads, 128]
//     K_cache bf16 [pages, page_size, kv_heads, 128], written
//     V_cache bf16 [pages, page_size, kv_heads, 128], written
//     lengths_after int32 [batch], written
//     Q_rotated bf16 [batch, q_len, q_heads, 128], written

// 1. Numbers

constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int THREADS = 128;
constexpr int CHUNK = 8;  // elements of 16 bytes
constexpr int V_PARTS = HEAD_DIM_V / CHUNK;  // of a row of V, each moved by a thread
constexpr int HALF = 64;  // pairs of elements that are rotated
constexpr int ROTATED = HALF / CHUNK;  // parts of a row that are rotated
constexpr int PARTS = ROTATED + (HEAD_DIM - 2 * HALF) / CHUNK;  // of a row of Q or K

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

struct alignas(16) RowPart {  // neighbouring elements of a row
    bf16 at[CHUNK];
};

// Copies a part of a row. In the first ROTATED parts a pair (x, y), elements i and i + HALF, becomes
// (x cos - y sin, x sin + y cos), by the cosines and sines of the row's position.
__device__ __forceinline__ void move_rotated(
    const bf16* from, bf16* to, int part, const float* cosines, const float* sines) {
    if (part >= ROTATED) {
        const int column = 2 * HALF + (part - ROTATED) * CHUNK;
        *(RowPart*)(to + column) = *(const RowPart*)(from + column);
        return;
    }
    const int column = part * CHUNK;
    RowPart first = *(const RowPart*)(from + column), second = *(const RowPart*)(from + HALF + column);
    for (int i = 0; i < CHUNK; ++i) {
        const float x = to_float(first.at[i]), y = to_float(second.at[i]);
        const float c = to_float(cosines[column + i]), s = to_float(sines[column + i]);
        first.at[i] = to_bf16(x * c - y * s);
        second.at[i] = to_bf16(x * s + y * c);
    }
    *(RowPart*)(to + column) = first;
    *(RowPart*)(to + HALF + column) = second;
}

// 3. The kernel
//
// A block has one new row, of all heads, or one row of Q.

extern "C" __global__ void __launch_bounds__(THREADS)
append_to_pages_bf16_128_rotary_128(
    const bf16* __restrict__ K,  // [batch, new_len, kv_heads, 128]
    const bf16* __restrict__ V,  // [batch, new_len, kv_heads, 128]
    const int* __restrict__ lengths,  // [batch]
    const int* __restrict__ page_table,  // [batch, max_pages]
    const float* __restrict__ cosines,  // [angles, 64]
    const float* __restrict__ sines,  // [angles, 64]
    const bf16* __restrict__ Q,  // [batch, q_len, q_heads, 128]
    bf16* K_cache,  // [pages, page_size, kv_heads, 128]
    bf16* V_cache,  // [pages, page_size, kv_heads, 128]
    int* lengths_after,  // [batch]
    bf16* Q_rotated,  // [batch, q_len, q_heads, 128]
    long long k_stride_b, long long k_stride_s, long long k_stride_h,
    long long v_stride_b, long long v_stride_s, long long v_stride_h,
    long long lengths_stride_b,
    long long page_table_stride_b, long long page_table_stride_p,
    long long cosines_stride_p,
    long long sines_stride_p,
    long long q_stride_b, long long q_stride_s, long long q_stride_h,
    long long k_cache_stride_b, long long k_cache_stride_s, long long k_cache_stride_h,
    long long v_cache_stride_b, long long v_cache_stride_s, long long v_cache_stride_h,
    long long q_rotated_stride_b, long long q_rotated_stride_s, long long q_rotated_stride_h,
    int new_len, int kv_heads, int page_size, int pages, int max_pages, int q_len, int q_heads, int angles)
{
    int row = blockIdx.x % (new_len + q_len);
    const int b_idx = blockIdx.x / (new_len + q_len);
    const int begin = lengths[b_idx * lengths_stride_b];
    if (row == 0 && threadIdx.x == 0) lengths_after[b_idx] = begin + new_len;
    const auto rotate = [&](const bf16* from, bf16* to, int part, int position) {
        const long long angle = min(max(position, 0), angles - 1);
        move_rotated(from, to, part, cosines + angle * cosines_stride_p, sines + angle * sines_stride_p);
    };
    if (row >= new_len) {  // a row of Q
        row -= new_len;
        const bf16* from = Q + b_idx * q_stride_b + row * q_stride_s;
        bf16* to = Q_rotated + b_idx * q_rotated_stride_b + row * q_rotated_stride_s;
        for (int i = threadIdx.x; i < q_heads * PARTS; i += THREADS) {
            const int h_idx = i / PARTS;
            rotate(from + h_idx * q_stride_h, to + h_idx * q_rotated_stride_h, i % PARTS, begin + new_len - q_len + row);
        }
        return;
    }
    const int position = begin + row;
    if (position < 0 || position / page_size >= max_pages) return;
    const long long page = page_table[b_idx * page_table_stride_b + position / page_size * page_table_stride_p];
    const int place = position % page_size;
    if (page < 0 || page >= pages) return;

    const bf16* k_from = K + b_idx * k_stride_b + row * k_stride_s;
    bf16* k_to = K_cache + page * k_cache_stride_b + place * k_cache_stride_s;
    for (int i = threadIdx.x; i < kv_heads * PARTS; i += THREADS) {
        const int h_idx = i / PARTS, part = i % PARTS;
        const bf16* from = k_from + h_idx * k_stride_h;
        bf16* to = k_to + h_idx * k_cache_stride_h;
        rotate(from, to, part, position);
    }

    const bf16* v_from = V + b_idx * v_stride_b + row * v_stride_s;
    bf16* v_to = V_cache + page * v_cache_stride_b + place * v_cache_stride_s;
    for (int i = threadIdx.x; i < kv_heads * V_PARTS; i += THREADS) {
        const int h_idx = i / V_PARTS, part = i % V_PARTS;
        const bf16* from = v_from + h_idx * v_stride_h;
        bf16* to = v_to + h_idx * v_cache_stride_h;
        *(RowPart*)(to + part * CHUNK) = *(const RowPart*)(from + part * CHUNK);
    }
}
