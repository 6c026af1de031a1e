// TMA and wgmma do not see what threads wrote to shared memory before the writers do this, and then meet at a barrier.
//: The copy engine and the tensor cores reach shared memory by a way of their own, past the order that a barrier gives to
//: threads.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
