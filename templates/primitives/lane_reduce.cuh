// `x` of WIDTH neighbouring lanes combined, known to all of them.
//: A shuffle reads another lane's register, without memory. In the first step a lane combines with the one WIDTH / 2 away,
//: then with the one half as far, and so on: log2(WIDTH) steps, after which all lanes have the result; reading 31 lanes one by
//: one would take 31 steps.
template <int WIDTH, typename Combine> __device__ __forceinline__ float lane_reduce(float x, Combine combine) {
    for (int lanes = WIDTH / 2; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, lanes));
    return x;
}
