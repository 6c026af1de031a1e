// wrong: wrong: y[0, 32] is
    __shared__ float tile[TILE][TILE + 1];
    const int tx = threadIdx.x, ty = threadIdx.y, column = blockIdx.x * TILE, row = blockIdx.y * TILE;
    for (int i = ty; i < TILE; i += ROWS) tile[i][tx] = x[(row + i) * columns + column + tx];
    __syncthreads();
    for (int i = ty; i < TILE; i += ROWS) y[(row + i) * columns + column + tx] = tile[tx][i];  // <- reported
