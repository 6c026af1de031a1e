// wrong: copy in flight: products read their tiles until
    const int t = threadIdx.x, tiles = keys / TILE;
    if (t == 0) {
        mbarrier_init(&q_full, 1);
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(&full[i], 1);
            mbarrier_init(&empty[i], CONSUMERS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    if (t >= CONSUMERS) {
        if (t > CONSUMERS) return;
        mbarrier_expect_bytes(&q_full, BYTES);
        tma_load(q_tile, &q, &q_full, 0, 0, 0, 0, L2_EVICT_FIRST);
        for (int i = 0; i < tiles; ++i) {
            const int stage = i % STAGES;
            mbarrier_wait(&empty[stage], i / STAGES % 2 ^ 1);
            mbarrier_expect_bytes(&full[stage], BYTES);
            tma_load(k_tile[stage], &k, &full[stage], 0, TILE * i, 0, 0, L2_EVICT_FIRST);
        }
        return;
    }

    mbarrier_wait(&q_full, 0);
    for (int i = 0; i < tiles; ++i) {
        const int stage = i % STAGES;
        const unsigned a = smem_operand(q_tile, 0), b = smem_operand(k_tile[stage], 0);
        float d[TILE / 2] = {};
        mbarrier_wait(&full[stage], i / STAGES % 2);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < D / 16; ++step)
            wgmma_64x64x16(d, smem_descriptor(a + 2 * step), smem_descriptor(b + 2 * step), step > 0);
        wgmma_commit();
        mbarrier_arrive(&empty[stage]);
        wgmma_wait<0>();
        wgmma_received(d);
        float* to = s + (16 * (t / 32) + t % 32 / 4) * keys + TILE * i + 2 * (t % 4);
#pragma unroll
        for (int j = 0; j < TILE / 4; ++j) *(float2*)(to + 8 * (j % 2) * keys + 8 * (j / 2)) = make_float2(d[2 * j], d[2 * j + 1]);
    }
