// wrong: never written: s[256] is never written
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n / 128 * 128) return;
    float sum = 0.0f;
    for (int c = 0; c < D; ++c) sum += q[c] * k[i * D + c];
    s[i] = scale * sum;
