// The rows of one sequence among those of all.
struct Sequence {
    int begin, length;
};

// Sequence b of packed rows: cu_seqlens[b] is its first row, cu_seqlens[b + 1] the row after its last one. It has `longest` rows
// at most, as the launch assumes.
__device__ __forceinline__ Sequence sequence_of(const int* cu_seqlens, int b, int longest) {
    const int begin = cu_seqlens[b];
    return {begin, min(cu_seqlens[b + 1] - begin, longest)};
}
