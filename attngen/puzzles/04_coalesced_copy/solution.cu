    for (int g = threadIdx.x; g < ROWS * COLUMNS / 4; g += THREADS) {
        const int row = blockIdx.x * ROWS + g / (COLUMNS / 4), c = g % (COLUMNS / 4);
        if (row < rows) ((float4*)y)[row * (COLUMNS / 4) + c] = ((const float4*)x)[row * (stride / 4) + c];
    }
