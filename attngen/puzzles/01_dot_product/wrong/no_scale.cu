// wrong: wrong: of s are wrong
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0.0f;
    for (int c = 0; c < D; ++c) sum += q[c] * k[i * D + c];
    s[i] = sum;  // <- reported
