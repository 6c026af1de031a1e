// wrong: wrong: y[1, 0] is
    for (int e = threadIdx.x; e < ROWS * COLUMNS; e += THREADS) {
        const int at = blockIdx.x * ROWS * COLUMNS + e;
        if (at < rows * COLUMNS) y[at] = x[at];  // <- reported
    }
