// wrong: race: let one thread write it
    __shared__ float k_tile[KEYS][D], q_tile[ROWS][D + 1], do_tile[ROWS][D], lse_tile[ROWS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * KEYS;
    for (int j = warp; j < KEYS; j += WARPS) {
        const int r = first + j;
        k_tile[j][lane] = r < n ? k[r * D + lane] * SCALE : 0.0f;
        float product = r < n ? o[r * D + lane] * d_o[r * D + lane] : 0.0f;
        for (int lanes = 16; lanes > 0; lanes /= 2) product += __shfl_xor_sync(0xffffffff, product, lanes);
        if (r < n && lane == 0) delta[r] = product;
    }

    float sum[KEYS / WARPS] = {};
    for (int begin = 0; begin < n; begin += ROWS) {
        for (int r = warp; r < ROWS; r += WARPS) {
            const bool inside = begin + r < n;
            q_tile[r][lane] = inside ? q[(begin + r) * D + lane] : 0.0f;
            do_tile[r][lane] = inside ? d_o[(begin + r) * D + lane] : 0.0f;
        }
        if (begin + lane < n) lse_tile[lane] = lse[begin + lane];  // <- reported
        __syncthreads();
        for (int i = 0; i < KEYS / WARPS; ++i) {
            const int j = warp + WARPS * i;
            float x = 0.0f;
            for (int c = 0; c < D; ++c) x += q_tile[lane][c] * k_tile[j][c];
            const float p = begin + lane < n ? expf(x - lse_tile[lane]) : 0.0f;
            for (int r = 0; r < ROWS; ++r) sum[i] += __shfl_sync(0xffffffff, p, r) * do_tile[r][lane];
        }
        __syncthreads();
    }
    for (int i = 0; i < KEYS / WARPS; ++i) {
        const int j = first + warp + WARPS * i;
        if (j < n) dv[j * D + lane] = sum[i];
    }
