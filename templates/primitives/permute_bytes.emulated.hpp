// The meaning of prmt.
#pragma once

namespace ptx {

inline void prmt_b32(int, unsigned& d, unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    d = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned digit = selector >> 4 * i & 15, byte = both >> 8 * (digit & 7) & 255;
        d |= (digit & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
}

}  // namespace ptx
