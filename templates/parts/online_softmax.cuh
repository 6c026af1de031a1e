// One step of an online softmax: the maximum of a row becomes `x`, if that is more. Returns the factor of a sum that was made
// under the old maximum.
__device__ __forceinline__ float raise_max(float& row_max, float x) {
    const float new_max = fmaxf(row_max, x);
    const float shift = new_max == -INF ? 0.0f : new_max;  // no key yet: exp(-inf - 0) = 0, not NaN
    const float alpha = expf(row_max - shift);
    row_max = new_max;
    return alpha;
}
