// wrong: wrong: scores of key 40 near 130
    __shared__ float q_tile[ROWS][D], k_tile[KEYS][D + 1], v_tile[KEYS][D];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * ROWS;
    for (int r = warp; r < ROWS; r += WARPS) q_tile[r][lane] = first + r < rows ? q[(first + r) * D + lane] * SCALE : 0.0f;

    float m[ROWS / WARPS], l[ROWS / WARPS], sum[ROWS / WARPS];
    for (int i = 0; i < ROWS / WARPS; ++i) m[i] = -INFINITY, l[i] = sum[i] = 0.0f;
    for (int begin = 0; begin < keys; begin += KEYS) {
        for (int j = warp; j < KEYS; j += WARPS) {
            const bool inside = begin + j < keys;
            k_tile[j][lane] = inside ? k[(begin + j) * D + lane] : 0.0f;
            v_tile[j][lane] = inside ? v[(begin + j) * D + lane] : 0.0f;
        }
        __syncthreads();
        for (int i = 0; i < ROWS / WARPS; ++i) {
            const int r = warp + WARPS * i;
            float x = 0.0f;
            for (int c = 0; c < D; ++c) x += q_tile[r][c] * k_tile[lane][c];
            if (begin + lane >= keys) x = -INFINITY;
            float larger = fmaxf(m[i], x);
            for (int lanes = 16; lanes > 0; lanes /= 2) larger = fmaxf(larger, __shfl_xor_sync(0xffffffff, larger, lanes));
            if (begin > 0) larger = m[i];
            const float rescale = expf(m[i] - larger), weight = expf(x - larger);
            float weights = weight;
            for (int lanes = 16; lanes > 0; lanes /= 2) weights += __shfl_xor_sync(0xffffffff, weights, lanes);
            l[i] = l[i] * rescale + weights;
            sum[i] *= rescale;
            for (int j = 0; j < KEYS; ++j) sum[i] += __shfl_sync(0xffffffff, weight, j) * v_tile[j][lane];
            m[i] = larger;
        }
        __syncthreads();
    }
    for (int i = 0; i < ROWS / WARPS; ++i) {
        const int r = first + warp + WARPS * i;
        if (r < rows) o[r * D + lane] = sum[i] / l[i];  // <- reported
    }
