    __shared__ float tile[TILE][TILE + 1];
    const int tx = threadIdx.x, ty = threadIdx.y, column = blockIdx.x * TILE, row = blockIdx.y * TILE;
    for (int i = ty; i < TILE; i += ROWS) tile[i][tx] = x[(row + i) * columns + column + tx];
    __syncthreads();
    for (int i = ty; i < TILE; i += ROWS) y[(column + i) * rows + row + tx] = tile[tx][i];
