// The join of split keys: partial rows become one, each by its share of the sum.
//
//     total[r] = log(exp(lse[0][r]) + ... + exp(lse[splits - 1][r]))
//     o[r][c]  = exp(lse[0][r] - total[r]) * o_part[0][r][c] + ... + exp(lse[splits - 1][r] - total[r]) * o_part[splits - 1][r][c]
//
// o_part   splits x rows x 32 numbers
// lse      splits x rows numbers; -INFINITY for a part in which the row sees no key, whose o_part is NaN and must not be used
// o        rows x 32 numbers, written by this kernel; 0 for a row that sees no key in any part
//
// Launch: ceil(rows / 4) blocks of 128 threads: four warps, a row for each. rows need not be a multiple of 4. splits is at least 1.
constexpr int D = 32, WARPS = 4;
#define INFINITY __int_as_float(0x7f800000)

extern "C" __global__ void join_splits(const float* o_part, const float* lse, float* o, int rows, int splits) {
    // your code
}
