// wrong: misaligned access
    for (int e = threadIdx.x; e < ROWS * COLUMNS; e += THREADS) {
        const int row = blockIdx.x * ROWS + e / COLUMNS, c = e % COLUMNS;
        if (row < rows && c < COLUMNS - 3) *(float4*)(y + row * COLUMNS + c) = *(const float4*)(x + row * stride + c);  // <- reported
    }
