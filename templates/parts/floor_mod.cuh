// The remainder of floor_div: it has the divisor's sign.
template <typename Int, typename Divisor>
__device__ __forceinline__ auto floor_mod(Int a, Divisor b) {
    return a % b + (a % b != 0 && (a % b < 0) != (b < 0) ? b : 0);
}
