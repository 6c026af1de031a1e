// Moves registers between warpgroups: a producer gives what consumers take. All four warps of a warpgroup do it; taking waits
// until enough have been given.
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
