// wrong: race: a later round
    const int x = threadIdx.x, y = threadIdx.y, column = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
    float sum[TILE / ROWS] = {};
    for (int begin = 0; begin < n; begin += TILE) {
        for (int i = 0; i < TILE; i += ROWS) {
            a_tile[y + i][x] = a[(row + i) * n + begin + x];  // <- reported
            b_tile[y + i][x] = b[(begin + y + i) * n + column];  // <- reported
        }
        __syncthreads();
        for (int k = 0; k < TILE; ++k) {
            const float one = b_tile[k][x];  // <- reported
            for (int i = 0; i < TILE / ROWS; ++i) sum[i] += a_tile[y + ROWS * i][k] * one;  // <- reported
        }
    }
    for (int i = 0; i < TILE / ROWS; ++i) c[(row + ROWS * i) * n + column] = sum[i];
