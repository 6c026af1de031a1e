// wrong: never written: y[8, 0] is never written
    __shared__ float tile[TILE][TILE + 1];
    const int tx = threadIdx.x, ty = threadIdx.y, column = blockIdx.x * TILE, row = blockIdx.y * TILE;
    for (int i = ty; i < TILE; i += ROWS) tile[i][tx] = x[(row + i) * columns + column + tx];
    __syncthreads();
    y[(column + ty) * rows + row + tx] = tile[tx][ty];
