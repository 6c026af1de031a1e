// wrong: copy in flight: cp_async_commit()
    __shared__ alignas(16) float k_tile[2][TILE][D + 4];
    const int t = threadIdx.x;
    auto load = [&](int buffer, int begin) {
        for (int i = t; i < TILE * D / 4; i += THREADS) {
            const int j = i / (D / 4), c = 4 * (i % (D / 4));
            const bool inside = begin + j < n;
            cp_async_16(&k_tile[buffer][j][c], k + (inside ? begin + j : 0) * D + c, inside);
        }
        cp_async_commit();
    };
    load(0, 0);
    for (int begin = 0, buffer = 0; begin < n; begin += TILE, buffer ^= 1) {
        __syncthreads();  // this tile is there, and the other buffer has been read
        if (begin + TILE < n) load(buffer ^ 1, begin + TILE);
        float sum = 0.0f;
        for (int c = 0; c < D; c += 4) {
            const float4 x = *(const float4*)(q + c), y = *(const float4*)&k_tile[buffer][t][c];  // <- reported
            sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
        }
        if (begin + t < n) s[begin + t] = sum;
    }
