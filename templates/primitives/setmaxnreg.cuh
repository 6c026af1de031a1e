// Move registers between warpgroups: a producer gives some up, consumers take them. All four warps of a warpgroup call it;
// taking waits until enough registers are free.
//: At launch, the 65536 registers of a multiprocessor are divided evenly. A thread that copies needs some two dozen, threads
//: that multiply need 160 to 240 for their sums: redistributed, larger tiles fit.
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
