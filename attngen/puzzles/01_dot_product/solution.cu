    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0.0f;
    for (int half = 0; half < 2; ++half) {
        const float4 a = ((const float4*)q)[half];
        const float4 b = ((const float4*)k)[2 * i + half];
        sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    s[i] = scale * sum;
