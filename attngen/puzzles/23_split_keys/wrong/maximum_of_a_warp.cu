// wrong: wrong: scores of key 31 and 32 near 130
    __shared__ float m_of[WARPS], l_of[WARPS], sum_of[WARPS][D];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = blockIdx.x * split, end = min(keys, begin + split);
    const float query = q[lane] * SCALE;
    float m = -INFINITY, l = 0.0f, sum = 0.0f;
    for (int j = begin + warp; j < end; j += WARPS) {
        float x = query * k[j * D + lane];
        for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
        const float larger = fmaxf(m, x), rescale = expf(m - larger), weight = expf(x - larger);
        l = l * rescale + weight;
        sum = sum * rescale + weight * v[j * D + lane];
        m = larger;
    }
    sum_of[warp][lane] = sum;
    if (lane == 0) {
        m_of[warp] = m;
        l_of[warp] = l;
    }
    __syncthreads();
    if (warp > 0) return;

    float largest = m_of[0];
    l = sum = 0.0f;
    for (int w = 0; w < WARPS; ++w) {
        const float rescale = expf(m_of[w] - largest);
        l += l_of[w] * rescale;
        sum += sum_of[w][lane] * rescale;
    }
    o_part[blockIdx.x * D + lane] = sum / l;  // <- reported
    if (lane == 0) lse[blockIdx.x] = largest + logf(l);
