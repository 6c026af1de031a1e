// The meaning of ldmatrix (PTX ISA, "Warp-level matrix load instruction"): lane 8 m + r gives the address of row r of matrix m; lane l
// receives elements [l / 4][2 (l % 4)] and [l / 4][2 (l % 4) + 1] of each matrix, or of its transpose.
#pragma once

namespace ptx {

struct MatrixRows { unsigned row; };
struct MatrixFragments { unsigned registers[4]; };

template <int MATRICES, bool TRANSPOSED> void load_matrices(emulator::Lane (&lanes)[32], int line) {
    unsigned short element[MATRICES][8][8];
    for (int i = 0; i < 8 * MATRICES; ++i) {
        const void* row = emulator::shared_pointer(((const MatrixRows*)lanes[i].in)->row);
        emulator::check_access(row, 16, false, line, i);
        memcpy(element[i / 8][i % 8], row, 16);
    }
    for (int l = 0; l < 32; ++l)
        for (int m = 0; m < MATRICES; ++m) {
            const int r = l / 4, c = l % 4 * 2;
            const unsigned low = TRANSPOSED ? element[m][c][r] : element[m][r][c];
            const unsigned high = TRANSPOSED ? element[m][c + 1][r] : element[m][r][c + 1];
            ((MatrixFragments*)lanes[l].out)->registers[m] = high << 16 | low;
        }
}

template <int MATRICES, bool TRANSPOSED> MatrixFragments ldmatrix(int line, unsigned row) {
    MatrixRows in{row};
    MatrixFragments out;
    emulator::warp_collective("ldmatrix", line, 0xffffffffu, &in, &out, load_matrices<MATRICES, TRANSPOSED>);
    return out;
}

inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(int line, unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned row) {
    const MatrixFragments f = ldmatrix<4, false>(line, row);
    a = f.registers[0], b = f.registers[1], c = f.registers[2], d = f.registers[3];
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(int line, unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned row) {
    const MatrixFragments f = ldmatrix<4, true>(line, row);
    a = f.registers[0], b = f.registers[1], c = f.registers[2], d = f.registers[3];
}
inline void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(int line, unsigned& a, unsigned& b, unsigned row) {
    const MatrixFragments f = ldmatrix<2, true>(line, row);
    a = f.registers[0], b = f.registers[1];
}

}  // namespace ptx
