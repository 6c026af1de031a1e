// wrong: race: this copy replaces what other threads still read
    const int t = threadIdx.x;
    if (t == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], THREADS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    auto load = [&](int i) {
        mbarrier_expect_bytes(&full[i % STAGES], BYTES);
        bulk_load(buffer[i % STAGES], x + i * TILE, BYTES, &full[i % STAGES]);  // <- reported
    };
    if (t == 0)
        for (int i = 0; i < STAGES && i < tiles; ++i) load(i);

    float sum[TILE / THREADS] = {};
    for (int i = 0; i < tiles; ++i) {
        const int s = i % STAGES, parity = i / STAGES % 2;
        mbarrier_wait(&full[s], parity);
        mbarrier_arrive(&empty[s]);
        for (int j = 0; j < TILE / THREADS; ++j) sum[j] += buffer[s][t + THREADS * j];
        if (t == 0 && i + STAGES < tiles) {
            mbarrier_wait(&empty[s], parity);
            load(i + STAGES);
        }
    }
    for (int j = 0; j < TILE / THREADS; ++j) y[t + THREADS * j] = sum[j];
