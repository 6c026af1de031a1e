// wrong: out of bounds: past the end of k
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0.0f;
    for (int c = 0; c < D; ++c) sum += q[c] * k[i * D + c];  // <- reported
    s[i] = scale * sum;
