// The meaning of stmatrix (PTX ISA, "Warp-level matrix store instruction"): ldmatrix the other way round.
#pragma once

#include "ldmatrix.emulated.hpp"

namespace ptx {

struct StoredMatrices { unsigned row, registers[4]; };

template <bool TRANSPOSED> inline void store_matrices(emulator::Lane (&lanes)[32], int line) {
    for (int i = 0; i < 32; ++i) {
        unsigned short row[8];
        for (int c = 0; c < 8; ++c) {
            const int in_row = TRANSPOSED ? c : i % 8, in_column = TRANSPOSED ? i % 8 : c;  // a place in the fragment
            const auto& from = *(const StoredMatrices*)lanes[in_row * 4 + in_column / 2].in;
            row[c] = from.registers[i / 8] >> 16 * (in_column % 2) & 0xffff;
        }
        void* to = emulator::shared_pointer(((const StoredMatrices*)lanes[i].in)->row);
        emulator::check_access(to, 16, true, line, i);
        memcpy(to, row, 16);
    }
}

inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(int line, unsigned row, unsigned a, unsigned b, unsigned c, unsigned d) {
    StoredMatrices in{row, {a, b, c, d}};
    char nothing = 0;
    emulator::warp_collective("stmatrix", line, 0xffffffffu, &in, &nothing, store_matrices<false>);
}
inline void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(int line, unsigned row, unsigned a, unsigned b, unsigned c, unsigned d) {
    StoredMatrices in{row, {a, b, c, d}};
    char nothing = 0;
    emulator::warp_collective("stmatrix", line, 0xffffffffu, &in, &nothing, store_matrices<true>);
}

}  // namespace ptx
