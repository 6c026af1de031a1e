// wrong: wrong: s[0, 0] is
    __shared__ alignas(16) fp16 q_tile[TILE][D + 8], k_tile[TILE][D + 8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.y * TILE, key = blockIdx.x * TILE;
    for (int i = threadIdx.x; i < TILE * D / 8; i += THREADS) {
        const int r = i / (D / 8), c = 8 * (i % (D / 8));
        *(uint4*)&q_tile[r][c] = *(const uint4*)(q + (row + r) * D + c);
        *(uint4*)&k_tile[r][c] = *(const uint4*)(k + (key + r) * D + c);
    }
    __syncthreads();

    float upper[TILE / 8][2] = {}, lower[TILE / 8][2] = {};
#pragma unroll
    for (int c = 0; c < D; c += 16) {
        unsigned a[4], b[4];
        ldmatrix_x4(a, &q_tile[16 * warp + lane % 16][c + 8 * (lane / 16)]);
#pragma unroll
        for (int j = 0; j < TILE / 16; ++j) {
            ldmatrix_x4(b, &k_tile[16 * j + lane % 16][c + 8 * (lane / 16)]);
            mma_16x8x16(upper[2 * j], lower[2 * j], a, b[0], b[1]);
            mma_16x8x16(upper[2 * j + 1], lower[2 * j + 1], a, b[2], b[3]);
        }
    }
    float* to = s + (row + 16 * warp + lane / 4) * keys + key + 2 * (lane % 4);
    for (int j = 0; j < TILE / 8; ++j) {
        *(float2*)(to + 8 * j) = make_float2(upper[j][0], upper[j][1]);  // <- reported
        *(float2*)(to + 8 * keys + 8 * j) = make_float2(lower[j][0], lower[j][1]);
    }
