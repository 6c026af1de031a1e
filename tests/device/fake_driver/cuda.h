// A stand-in for CUDA's driver API, as far as docs/launch/main.cpp calls it: memory is the host's, and a launch prints its arguments.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct Context*;
using CUmodule = struct Module*;
using CUfunction = std::string*;
using CUstream = struct Stream*;
enum { CUDA_SUCCESS = 0, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };

inline std::map<CUdeviceptr, size_t>& allocations() { static std::map<CUdeviceptr, size_t> all; return all; }
inline CUresult cuGetErrorName(CUresult, const char** name) { *name = "fake"; return 0; }
inline CUresult cuInit(unsigned) { return 0; }
inline CUresult cuDeviceGet(CUdevice*, int) { return 0; }
inline CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice) { return 0; }
inline CUresult cuDevicePrimaryCtxRelease(CUdevice) { return 0; }
inline CUresult cuCtxSetCurrent(CUcontext) { return 0; }
inline CUresult cuCtxSynchronize() { return 0; }
inline CUresult cuModuleLoadData(CUmodule*, const void*) { return 0; }
inline CUresult cuModuleUnload(CUmodule) { return 0; }
inline CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) { *function = new std::string(name); return 0; }
inline CUresult cuFuncSetAttribute(CUfunction, int, int bytes) { std::printf("allowed %d\n", bytes); return 0; }
inline CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
    *address = (CUdeviceptr)std::malloc(bytes);
    allocations()[*address] = bytes;
    return 0;
}
inline CUresult cuMemFree(CUdeviceptr address) { std::free((void*)address); return 0; }
inline CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) { std::memcpy((void*)to, from, bytes); return 0; }
inline CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) { std::memcpy(to, (void*)from, bytes); return 0; }
inline CUresult cuMemsetD16(CUdeviceptr to, unsigned short value, size_t count) {
    for (size_t i = 0; i < count; ++i) ((unsigned short*)to)[i] = value;
    return 0;
}
inline CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared, CUstream, void** parameters, void**) {
    std::printf("launch %s\ngrid %u %u %u\nblock %u %u %u\nshared %u\n", function->c_str(), gx, gy, gz, bx, by, bz, shared);
    const char* kinds = std::getenv("PARAMETERS");  // a letter for each: p(ointer), l(ong long), i(nt)
    for (int i = 0; kinds[i]; ++i) {
        const long long value = kinds[i] == 'i' ? *(int*)parameters[i] : *(long long*)parameters[i];
        const auto found = allocations().find((CUdeviceptr)value);
        if (kinds[i] == 'p') std::printf("%ld bytes\n", found == allocations().end() ? -1l : long(found->second));
        else std::printf("%lld\n", value);
    }
    return 0;
}
