// The rows and the head of a block. Blocks are numbered so that those that run together read the same keys and values from
// L2, those of a section of heads; and of a section the last rows come first: under a causal mask they have most to do.
//: L2 holds some tens of MB and is shared by all multiprocessors; keys and values of a head are read once by each block of
//: rows. If blocks that run at the same time have the same heads, all but the first find them in L2. And whoever starts
//: last should have the least to do: the long rows first, so that multiprocessors finish together.
struct Place {
    int q_block, h_idx, b_idx;
};
__device__ __forceinline__ Place place_of(int block, int blocks, int q_heads, int kv_heads, int q_len, int kv_len) {
    const int q_blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q;
    const int all_heads = blocks / q_blocks;  // of the whole batch
    const long long sharing = (long long)max(1, L2_ROWS / max(kv_len, 1)) * (q_heads / kv_heads);  // heads whose keys L2 holds
    const int section = (int)min((long long)all_heads, sharing);
    const int first = block / (section * q_blocks) * section;  // head of the section
    const int here = min(section, all_heads - first);
    const int in_section = block - first * q_blocks;
    const int head = first + in_section % here;
    return {q_blocks - 1 - in_section / here, head % q_heads, head / q_heads};
}
