// wrong: wrong: has every variable a value before it is read?
    const float* row = x + blockIdx.x * columns;
    float sum;
    for (int c = threadIdx.x; c < columns; c += THREADS) sum += row[c];
    partial[threadIdx.x] = sum;
    for (int step = THREADS / 2; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
    }
    if (threadIdx.x == 0) y[blockIdx.x] = partial[0];  // <- reported
