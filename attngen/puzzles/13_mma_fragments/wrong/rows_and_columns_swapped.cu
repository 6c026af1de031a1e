// wrong: wrong: s[0, 0] is
    const int g = threadIdx.x / 4, t = threadIdx.x % 4, row = 16 * blockIdx.y + g, key = 8 * blockIdx.x;
    float upper[2] = {}, lower[2] = {};
    for (int c = 2 * t; c < d; c += 16) {
        unsigned a[4], b[2];
        for (int i = 0; i < 4; ++i) a[i] = *(const unsigned*)(q + (row + 8 * (i / 2)) * d + c + 8 * (i % 2));
        for (int i = 0; i < 2; ++i) b[i] = *(const unsigned*)(k + (key + g) * d + c + 8 * i);
        mma_16x8x16(upper, lower, a, b[0], b[1]);
    }
    *(float2*)(s + row * keys + key + 2 * t) = make_float2(upper[0], upper[1]);  // <- reported
    *(float2*)(s + (row + 8) * keys + key + 2 * t) = make_float2(lower[0], lower[1]);
