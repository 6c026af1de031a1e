// wrong: divergent barrier
    const float* row = x + blockIdx.x * columns;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < columns; c += THREADS) sum += row[c];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int step = THREADS / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) {
            partial[threadIdx.x] += partial[threadIdx.x + step];
            __syncthreads();  // <- reported
        }
    }
    if (threadIdx.x == 0) y[blockIdx.x] = partial[0];
