// wrong: wrong: of dq are wrong
    __shared__ float q_tile[ROWS][D], do_tile[ROWS][D], lse_tile[ROWS], delta_tile[ROWS], k_tile[KEYS][D + 1], v_tile[KEYS][D + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * ROWS;
    for (int r = warp; r < ROWS; r += WARPS) {
        const bool inside = first + r < n;
        q_tile[r][lane] = inside ? q[(first + r) * D + lane] * SCALE : 0.0f;
        do_tile[r][lane] = inside ? d_o[(first + r) * D + lane] : 0.0f;
    }
    if (threadIdx.x < ROWS) {
        const bool inside = first + threadIdx.x < n;
        lse_tile[threadIdx.x] = inside ? lse[first + threadIdx.x] : 0.0f;
        delta_tile[threadIdx.x] = inside ? delta[first + threadIdx.x] : 0.0f;
    }

    float sum[ROWS / WARPS] = {};
    const int end = min(n, first + ROWS);
    for (int begin = 0; begin < end; begin += KEYS) {
        for (int j = warp; j < KEYS; j += WARPS) {
            const bool inside = begin + j < n;
            k_tile[j][lane] = inside ? k[(begin + j) * D + lane] : 0.0f;
            v_tile[j][lane] = inside ? v[(begin + j) * D + lane] : 0.0f;
        }
        __syncthreads();
        for (int i = 0; i < ROWS / WARPS; ++i) {
            const int r = warp + WARPS * i;
            float x = 0.0f, gain = 0.0f;
            for (int c = 0; c < D; ++c) {
                x += q_tile[r][c] * k_tile[lane][c];
                gain += do_tile[r][c] * v_tile[lane][c];
            }
            const bool seen = begin + lane <= first + r + 1;
            const float ds = seen ? expf(x - lse_tile[r]) * (gain - delta_tile[r]) : 0.0f;
            for (int j = 0; j < KEYS; ++j) sum[i] += __shfl_sync(0xffffffff, ds, j) * k_tile[j][lane];
        }
        __syncthreads();
    }
    for (int i = 0; i < ROWS / WARPS; ++i) {
        const int r = first + warp + WARPS * i;
        if (r < n) dq[r * D + lane] = sum[i] * SCALE;  // <- reported
    }
