// wrong: wrong: y[
    const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int c = lane; c < columns; c += 32) sum += x[row * columns + c];
    for (int m = 16; m > 1; m /= 2) sum += __shfl_xor_sync(0xffffffff, sum, m);
    if (lane == 0) y[row] = sum;  // <- reported
