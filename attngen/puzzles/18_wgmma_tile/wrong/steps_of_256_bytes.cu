// wrong: uninitialized shared read: in no array declared __shared__
    const int t = threadIdx.x, row = TILE * blockIdx.y, key = TILE * blockIdx.x;
    if (t == 0) {
        mbarrier_init(&full, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (t == 0) {
        mbarrier_expect_bytes(&full, 2 * BYTES);
        tma_load(q_tile, &q, &full, 0, row, 0, 0, L2_EVICT_FIRST);
        tma_load(k_tile, &k, &full, 0, key, 0, 0, L2_EVICT_LAST);
    }
    mbarrier_wait(&full, 0);

    float d[TILE / 2] = {};
    const unsigned a = smem_operand(q_tile, 0), b = smem_operand(k_tile, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
        wgmma_64x64x16(d, smem_descriptor(a + 16 * step), smem_descriptor(b + 16 * step), step > 0);  // <- reported
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_received(d);

    float* to = s + (row + 16 * (t / 32) + t % 32 / 4) * keys + key + 2 * (t % 4);
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) *(float2*)(to + 8 * h * keys + 8 * j) = make_float2(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
