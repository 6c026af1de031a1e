// wrong: out of bounds: past the end of x
    for (int e = threadIdx.x; e < ROWS * COLUMNS; e += THREADS) {
        const int row = blockIdx.x * ROWS + e / COLUMNS, c = e % COLUMNS;
        y[row * COLUMNS + c] = x[row * stride + c];  // <- reported
    }
