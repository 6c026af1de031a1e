// wrong: wrong: scores near -30000
    s += blockIdx.x * columns;
    p += blockIdx.x * columns;

    float m = -10000.0f, l = 0.0f;
    for (int c = threadIdx.x; c < columns; c += 32) {
        const float x = s[c], larger = fmaxf(m, x);
        l = l * expf(m - larger) + expf(x - larger);
        m = larger;
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const float other_m = __shfl_xor_sync(0xffffffff, m, lanes), other_l = __shfl_xor_sync(0xffffffff, l, lanes);
        const float larger = fmaxf(m, other_m);
        if (larger > -INFINITY) l = l * expf(m - larger) + other_l * expf(other_m - larger);
        m = larger;
    }
    for (int c = threadIdx.x; c < columns; c += 32) p[c] = expf(s[c] - m) / l;
