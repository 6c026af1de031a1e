// Required between writes of threads to shared memory and reads of the same by TMA or wgmma: the writers call this, and then
// a barrier follows.
//: The copy engine and wgmma access shared memory through a path of their own, the async proxy, which a barrier between threads
//: does not order.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
