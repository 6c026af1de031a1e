// TMA and wgmma do not see what threads wrote to shared memory before the writers do this, and then meet at a barrier.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
