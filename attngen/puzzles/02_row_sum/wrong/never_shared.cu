// wrong: uninitialized shared read
    const float* row = x + blockIdx.x * columns;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < columns; c += THREADS) sum += row[c];
    if (threadIdx.x < columns) partial[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int t = 1; t < THREADS; ++t) sum += partial[t];  // <- reported
        y[blockIdx.x] = sum;
    }
