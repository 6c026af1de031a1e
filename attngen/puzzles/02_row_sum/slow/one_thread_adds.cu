// medal: silver: wavefronts of shared memory
    const float* row = x + blockIdx.x * columns;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < columns; c += THREADS) sum += row[c];
    partial[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < THREADS; ++i) sum += partial[i];  // <- reported
    y[blockIdx.x] = sum;
