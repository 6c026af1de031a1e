// wrong: wrong: of o are wrong
    const int lane = threadIdx.x % 32, r = blockIdx.x * WARPS + threadIdx.x / 32;
    if (r >= rows) return;
    float m = 0.0f, l = 0.0f, sum = 0.0f;
    for (int begin = 0; begin < splits; begin += 32) {
        const float own = begin + lane < splits ? lse[(begin + lane) * rows + r] : -INFINITY;
        float larger = fmaxf(m, own);
        for (int lanes = 16; lanes > 0; lanes /= 2) larger = fmaxf(larger, __shfl_xor_sync(0xffffffff, larger, lanes));
        if (larger == -INFINITY) continue;  // no key so far
        const float rescale = expf(m - larger), share = expf(own - larger);
        l *= rescale;
        sum *= rescale;
        for (int s = begin; s < min(splits, begin + 32); ++s) {
            const float one = __shfl_sync(0xffffffff, share, s - begin);
            l += one;
            if (one > 0.0f) sum += one * o_part[(s * rows + r) * D + lane];
        }
        m = larger;
    }
    o[r * D + lane] = l > 0.0f ? sum / l : 0.0f;
