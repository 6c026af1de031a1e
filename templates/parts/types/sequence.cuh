// The rows of one sequence among those of all.
struct Sequence {
    int begin, length;
};

// Sequence b of packed rows: cu_seqlens[b] is its first row, cu_seqlens[b + 1] the row after its last one. It has `longest` rows
// at most, as the launch assumes, and lies within all `total` rows, whatever cu_seqlens holds.
__device__ __forceinline__ Sequence sequence_of(const int* cu_seqlens, int b, int longest, int total) {
    const int begin = min(max(cu_seqlens[b], 0), total), end = min(max(cu_seqlens[b + 1], begin), total);
    return {begin, min(end - begin, longest)};
}
