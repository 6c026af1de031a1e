// wrong: wrong: y[
    const float* row = x + blockIdx.x * columns;
    partial[threadIdx.x] = threadIdx.x < columns ? row[threadIdx.x] : 0.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int t = 0; t < THREADS; ++t) sum += partial[t];
        y[blockIdx.x] = sum;  // <- reported
    }
