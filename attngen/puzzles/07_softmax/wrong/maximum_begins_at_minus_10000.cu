// wrong: wrong: scores near -30000
    const int t = threadIdx.x;
    s += blockIdx.x * columns;
    p += blockIdx.x * columns;

    float m = -10000.0f;
    for (int c = t; c < columns; c += THREADS) {
        row[c] = s[c];
        m = fmaxf(m, row[c]);
    }
    partial[t] = m;
    for (int step = THREADS / 2; step > 0; step /= 2) {
        __syncthreads();
        if (t < step) partial[t] = fmaxf(partial[t], partial[t + step]);
    }
    __syncthreads();
    m = partial[0];
    __syncthreads();  // all have read it before it is replaced

    float l = 0.0f;
    for (int c = t; c < columns; c += THREADS) {
        row[c] = expf(row[c] - m);
        l += row[c];
    }
    partial[t] = l;
    for (int step = THREADS / 2; step > 0; step /= 2) {
        __syncthreads();
        if (t < step) partial[t] += partial[t + step];
    }
    __syncthreads();
    l = partial[0];
    for (int c = t; c < columns; c += THREADS) p[c] = row[c] / l;
