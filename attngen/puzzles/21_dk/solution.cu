    __shared__ float k_tile[KEYS][D], v_tile[KEYS][D], q_tile[ROWS][D + 1], do_tile[ROWS][D + 1], lse_tile[ROWS], delta_tile[ROWS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * KEYS;
    for (int j = warp; j < KEYS; j += WARPS) {
        const bool inside = first + j < n;
        k_tile[j][lane] = inside ? k[(first + j) * D + lane] * SCALE : 0.0f;
        v_tile[j][lane] = inside ? v[(first + j) * D + lane] : 0.0f;
    }

    float sum[KEYS / WARPS] = {};
    for (int begin = 0; begin < n; begin += ROWS) {
        for (int r = warp; r < ROWS; r += WARPS) {
            const bool inside = begin + r < n;
            q_tile[r][lane] = inside ? q[(begin + r) * D + lane] : 0.0f;
            do_tile[r][lane] = inside ? d_o[(begin + r) * D + lane] : 0.0f;
        }
        if (threadIdx.x < ROWS && begin + threadIdx.x < n) {
            lse_tile[threadIdx.x] = lse[begin + threadIdx.x];
            delta_tile[threadIdx.x] = delta[begin + threadIdx.x];
        }
        __syncthreads();
        for (int i = 0; i < KEYS / WARPS; ++i) {
            const int j = warp + WARPS * i;
            float x = 0.0f, gain = 0.0f;
            for (int c = 0; c < D; ++c) {
                x += q_tile[lane][c] * k_tile[j][c];
                gain += do_tile[lane][c] * v_tile[j][c];
            }
            const float ds = begin + lane < n ? expf(x - lse_tile[lane]) * (gain - delta_tile[lane]) : 0.0f;
            for (int r = 0; r < ROWS; ++r) sum[i] += __shfl_sync(0xffffffff, ds, r) * q_tile[r][lane];
        }
        __syncthreads();
    }
    for (int i = 0; i < KEYS / WARPS; ++i) {
        const int j = first + warp + WARPS * i;
        if (j < n) dk[j * D + lane] = sum[i] * SCALE;
    }
