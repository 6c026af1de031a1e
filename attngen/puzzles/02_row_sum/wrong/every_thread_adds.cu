// wrong: uninitialized global read
    const float* row = x + blockIdx.x * columns;
    for (int c = threadIdx.x; c < columns; c += THREADS) atomicAdd(&y[blockIdx.x], row[c]);  // <- reported
