// A stand-in for libcuda.so.1 that runs kernels on attngen's emulated device. The code of a kernel is the path of its library, memory
// is the host's, and a launch has ended when it returns. The environment says which GPU it is (FAKE_CAPABILITY, as in 90) and where to
// write the launches down (FAKE_LAUNCHES, a file).
#include <cuda.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>

namespace {

struct Library { void* handle; };
struct Kernel { std::string name; void* call; void* launch; };
struct Stacks { unsigned char* memory; std::uint64_t count; };  // as in attngen/device/emulated/runtime/state.hpp

int number(const char* variable, int usual) { return std::getenv(variable) ? std::atoi(std::getenv(variable)) : usual; }

CUresult succeed() { return CUDA_SUCCESS; }
thread_local bool has_context = false;  // as threads begin
CUresult context_device(CUdevice* device) { *device = 0; return has_context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
CUresult device_get(CUdevice* device, int) { *device = 0; return CUDA_SUCCESS; }
CUresult retain(CUcontext*, CUdevice) { return CUDA_SUCCESS; }
CUresult set_current(CUcontext) { has_context = true; return CUDA_SUCCESS; }
CUresult exchange(CUstreamCaptureMode*) { return CUDA_SUCCESS; }
CUresult kernel_attribute(CUfunction_attribute, int, CUkernel, CUdevice) { return CUDA_SUCCESS; }

CUresult attribute(int* value, CUdevice_attribute which, CUdevice) {
    const int capability = number("FAKE_CAPABILITY", 90);
    *value = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? capability / 10
             : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? capability % 10
                                                                     : number("FAKE_PROCESSORS", 2);
    return CUDA_SUCCESS;
}

CUresult allocate(CUdeviceptr* address, std::size_t bytes) {
    *address = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    return CUDA_SUCCESS;
}
CUresult release(CUdeviceptr address) { std::free(reinterpret_cast<void*>(address)); return CUDA_SUCCESS; }
CUresult to_device(CUdeviceptr to, const void* from, std::size_t bytes) { std::memcpy(reinterpret_cast<void*>(to), from, bytes); return CUDA_SUCCESS; }
CUresult to_host(void* to, CUdeviceptr from, std::size_t bytes) { std::memcpy(to, reinterpret_cast<void*>(from), bytes); return CUDA_SUCCESS; }
CUresult set_bytes(CUdeviceptr to, unsigned char value, std::size_t count) { std::memset(reinterpret_cast<void*>(to), value, count); return CUDA_SUCCESS; }
CUresult set_words(CUdeviceptr to, unsigned value, std::size_t count, CUstream) {
    for (std::size_t i = 0; i < count; ++i) reinterpret_cast<unsigned*>(to)[i] = value;
    return CUDA_SUCCESS;
}

CUresult load(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) {
    void* const handle = dlopen(static_cast<const char*>(code), RTLD_NOW | RTLD_LOCAL);
    if (!handle) std::fprintf(stderr, "%s\n", dlerror());
    *library = reinterpret_cast<CUlibrary>(new Library{handle});
    return handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

CUresult get_kernel(CUkernel* kernel, CUlibrary library, const char* name) {
    void* const handle = reinterpret_cast<Library*>(library)->handle;
    void* const call = dlsym(handle, (std::string("attngen_call_") + name).c_str());
    *kernel = reinterpret_cast<CUkernel>(new Kernel{name, call, dlsym(handle, "emulator_launch")});
    return call ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult launch(const CUlaunchConfig* c, CUfunction function, void** parameters, void**) {
    const Kernel& kernel = *reinterpret_cast<Kernel*>(function);
    const unsigned grid[3] = {c->gridDimX, c->gridDimY, c->gridDimZ}, block[3] = {c->blockDimX, c->blockDimY, c->blockDimZ};
    if (const char* path = std::getenv("FAKE_LAUNCHES")) {
        std::FILE* const file = std::fopen(path, "a");
        std::fprintf(file, "%s %u %u %u %u %u %u %u\n", kernel.name.c_str(), grid[0], grid[1], grid[2], block[0], block[1], block[2], c->sharedMemBytes);
        std::fclose(file);
    }
    static Stacks stacks{};
    static std::uint64_t counts[1024], totals[3], finding[4096];
    using Launch = int (*)(void*, void**, const unsigned*, const unsigned*, std::size_t, void*, int, std::uint64_t, int, std::uint64_t, int, int,
                           std::uint64_t*, std::uint64_t*, Stacks*, void*);
    const int status = reinterpret_cast<Launch>(kernel.launch)(kernel.call, parameters, grid, block, c->sharedMemBytes, nullptr, 0, 0, 0,
                                                               std::uint64_t(1) << 40, 1, int(c->numAttrs), counts, totals, &stacks, finding);
    return status ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

struct Map {  // as in attngen/device/emulated/runtime/tma.cpp
    char magic[8];
    std::uint64_t address, sizes[5], strides[4];
    std::uint16_t box[5];
    std::uint8_t rank, element_bytes, swizzled;
};

CUresult encode(CUtensorMap* packed, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill) {
    Map map{};
    std::memcpy(map.magic, "attnmap1", 8);
    map.address = reinterpret_cast<std::uint64_t>(address);
    for (unsigned i = 0; i < 5; ++i) map.sizes[i] = i < rank ? sizes[i] : 1, map.box[i] = std::uint16_t(i < rank ? box[i] : 1);
    for (unsigned i = 0; i < 4; ++i) map.strides[i] = i + 1 < rank ? strides[i] : 1;
    map.rank = std::uint8_t(rank), map.swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
    map.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
    std::memset(packed, 0, sizeof(*packed));
    std::memcpy(packed, &map, sizeof(map));
    return CUDA_SUCCESS;
}

template <class F> void* of(F* function) { return reinterpret_cast<void*>(function); }

}  // namespace

extern "C" CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult*) {
    static const std::map<std::string, void*> known = {
        {"cuInit", of(succeed)}, {"cuCtxSynchronize", of(succeed)}, {"cuCtxGetDevice", of(context_device)}, {"cuDeviceGet", of(device_get)},
        {"cuDevicePrimaryCtxRetain", of(retain)}, {"cuCtxSetCurrent", of(set_current)}, {"cuDeviceGetAttribute", of(attribute)},
        {"cuThreadExchangeStreamCaptureMode", of(exchange)}, {"cuKernelSetAttribute", of(kernel_attribute)}, {"cuMemAlloc", of(allocate)},
        {"cuMemFree", of(release)}, {"cuMemcpyHtoD", of(to_device)}, {"cuMemcpyDtoH", of(to_host)}, {"cuMemsetD8", of(set_bytes)},
        {"cuMemsetD32Async", of(set_words)}, {"cuLibraryLoadData", of(load)}, {"cuLibraryGetKernel", of(get_kernel)},
        {"cuLaunchKernelEx", of(launch)}, {"cuTensorMapEncodeTiled", of(encode)},
    };
    const auto found = known.find(name);
    *function = found == known.end() ? nullptr : found->second;
    return found == known.end() ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
