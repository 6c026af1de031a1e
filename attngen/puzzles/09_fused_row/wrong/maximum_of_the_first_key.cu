// wrong: wrong: scores of key 35 near 130
    const int lane = threadIdx.x % 32, r = blockIdx.x * WARPS + threadIdx.x / 32;
    if (r >= rows) return;
    const float query = q[r * D + lane] * SCALE;
    float m = -INFINITY, l = 0.0f, sum = 0.0f;
    for (int j = 0; j < keys; ++j) {
        float x = query * k[j * D + lane];
        for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
        const float larger = j == 0 ? x : m, rescale = expf(m - larger), weight = expf(x - larger);
        l = l * rescale + weight;
        sum = sum * rescale + weight * v[j * D + lane];
        m = larger;
    }
    o[r * D + lane] = sum / l;  // <- reported
