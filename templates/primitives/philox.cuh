// 128 random bits, a function of a counter and a key: Philox 4x32-7 (Salmon, Moraes, Dror, Shaw 2011).
//: A generator without a state: the bits of a pair are computed from its indices, in any order and as often as needed. Each
//: round multiplies two words of the counter, and mixes the upper halves of the products with the others and with the key.
struct RandomWords {
    unsigned at[4];
};
__device__ __forceinline__ RandomWords philox(RandomWords x, unsigned key0, unsigned key1) {
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const unsigned long long a = 0xD2511F53ull * x.at[0], b = 0xCD9E8D57ull * x.at[2];
        x = {(unsigned)(b >> 32) ^ x.at[1] ^ key0, (unsigned)b, (unsigned)(a >> 32) ^ x.at[3] ^ key1, (unsigned)a};
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    return x;
}
