// wrong: runaway loop
    for (int e = threadIdx.x; e < ROWS * COLUMNS;) {
        const int row = blockIdx.x * ROWS + e / COLUMNS, c = e % COLUMNS;
        if (row < rows) y[row * COLUMNS + c] = x[row * stride + c];  // <- reported
    }
