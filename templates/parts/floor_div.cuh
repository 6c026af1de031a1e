// The quotient rounded down; C's own rounds toward zero.
template <typename Int, typename Divisor>
__device__ __forceinline__ auto floor_div(Int a, Divisor b) {
    return a / b - (a % b != 0 && (a % b < 0) != (b < 0));
}
