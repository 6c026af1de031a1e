// A divisor b with the remainders of b. -1 has those of 1, but the quotient of the least integer and -1 does not fit its type, and
// C++ does not define a remainder then.
template <typename Int>
__device__ __forceinline__ Int divisor_of_remainder(Int b) {
    return b == -1 ? 1 : b;
}
