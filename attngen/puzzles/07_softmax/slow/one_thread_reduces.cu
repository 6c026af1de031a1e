// medal: silver: wavefronts of shared memory
    const int t = threadIdx.x;
    s += blockIdx.x * columns;
    p += blockIdx.x * columns;

    for (int c = t; c < columns; c += THREADS) row[c] = s[c];
    __syncthreads();
    if (t == 0) {
        float m = -INFINITY, l = 0.0f;
        for (int c = 0; c < columns; ++c) m = fmaxf(m, row[c]);  // <- reported
        for (int c = 0; c < columns; ++c) l += expf(row[c] - m);
        partial[0] = m, partial[1] = l;
    }
    __syncthreads();
    for (int c = t; c < columns; c += THREADS) p[c] = expf(row[c] - partial[0]) / partial[1];
