// wrong: race: write the same global memory
    const int i = threadIdx.x;
    if (i >= n) return;
    float sum = 0.0f;
    for (int c = 0; c < D; ++c) sum += q[c] * k[i * D + c];
    s[i] = scale * sum;  // <- reported
