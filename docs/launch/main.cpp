// Launches gpt2_fused.cubin with the CUDA driver, from the facts of gpt2_fused.json. See ../launch_from_cpp.md.
#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

// --- From the manifest

constexpr const char* ENTRY_POINT = "gpt2_fused";               // entry_points[0].name
constexpr unsigned BLOCK[3] = {128, 1, 1};                      // .block
constexpr unsigned SHARED_BYTES = 55308;                        // .shared_bytes
constexpr int ROWS = 128;                                       // .grid[0] is ceil(q_len / ROWS) * q_heads * batch
constexpr int HEAD_DIM = 64;                                    // the last extent of each tensor
struct Sections { int rows, least, most; };
constexpr Sections SECTIONS = {131072, 32, 128};                // of the parameter heads_in_l2

// The value of a parameter of binding "section": how many query heads are numbered together, to share K and V in L2.
int section_heads(Sections s, int batch, int q_heads, int kv_heads, int kv_len) {
    const int heads = batch * kv_heads;
    const int wanted = std::max(s.least, std::min(s.rows / std::max(kv_len, 1), s.most));
    const int sections = std::max(1, (heads + wanted / 2) / wanted);
    return (heads + sections - 1) / sections * (q_heads / kv_heads);
}

// --- The driver

void check(CUresult status, const char* call) {
    if (status == CUDA_SUCCESS) return;
    const char* name = nullptr;
    cuGetErrorName(status, &name);
    std::fprintf(stderr, "%s: %s\n", call, name ? name : "unknown error");
    std::exit(1);
}
#define CHECK(call) check(call, #call)

// A tensor [batch][heads][rows][HEAD_DIM] of fp16 in GPU memory, contiguous. Strides are in elements.
struct Tensor {
    CUdeviceptr address = 0;
    long long stride_b, stride_h, stride_s;
    size_t elements;

    Tensor(int batch, int heads, int rows)
        : stride_b((long long)heads * rows * HEAD_DIM), stride_h((long long)rows * HEAD_DIM), stride_s(HEAD_DIM), elements(batch * stride_b) {
        CHECK(cuMemAlloc(&address, elements * sizeof(unsigned short)));
    }
    ~Tensor() { cuMemFree(address); }
    Tensor(const Tensor&) = delete;
};

constexpr unsigned short ONE = 0x3c00;                          // fp16 bits

int main(int count, char** arguments) {
    const char* path = count > 1 ? arguments[1] : "gpt2_fused.cubin";
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> cubin{std::istreambuf_iterator<char>(file), {}};
    if (cubin.empty()) {
        std::fprintf(stderr, "cannot read %s\n", path);
        return 1;
    }

    CUdevice device;
    CUcontext context;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));

    CUmodule module;
    CUfunction function;
    CHECK(cuModuleLoadData(&module, cubin.data()));
    CHECK(cuModuleGetFunction(&function, module, ENTRY_POINT));
    CHECK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, SHARED_BYTES));

    int batch = 2, q_heads = 12, kv_heads = 12, q_len = 1000, kv_len = 1000;
    {
        Tensor Q(batch, q_heads, q_len), K(batch, kv_heads, kv_len), V(batch, kv_heads, kv_len), O(batch, q_heads, q_len);
        // Random Q and K, and V of ones: the weights of a row add up to 1, so that each element of O is 1.
        std::mt19937 random(0);
        for (Tensor* t : {&Q, &K}) {
            std::vector<unsigned short> values(t->elements);
            for (unsigned short& v : values) v = (unsigned short)(0x3800 + random() % 0x400 + (random() % 2 << 15));  // 0.5 to 1, of both signs
            CHECK(cuMemcpyHtoD(t->address, values.data(), values.size() * sizeof(values[0])));
        }
        CHECK(cuMemsetD16(V.address, ONE, V.elements));
        CHECK(cuMemsetD16(O.address, 0xffff, O.elements));      // NaN: what the kernel does not write is noticed

        // The addresses of the parameters' values, in the manifest's order.
        int heads_in_section = section_heads(SECTIONS, batch, q_heads, kv_heads, kv_len);
        void* parameters[] = {
            &Q.address, &K.address, &V.address, &O.address,
            &Q.stride_b, &Q.stride_h, &Q.stride_s, &K.stride_b, &K.stride_h, &K.stride_s,
            &V.stride_b, &V.stride_h, &V.stride_s, &O.stride_b, &O.stride_h, &O.stride_s,
            &q_heads, &kv_heads, &q_len, &kv_len, &heads_in_section,
        };
        const unsigned blocks = unsigned((q_len + ROWS - 1) / ROWS) * q_heads * batch;
        CHECK(cuLaunchKernel(function, blocks, 1, 1, BLOCK[0], BLOCK[1], BLOCK[2], SHARED_BYTES, nullptr, parameters, nullptr));
        CHECK(cuCtxSynchronize());

        std::vector<unsigned short> result(O.elements);
        CHECK(cuMemcpyDtoH(result.data(), O.address, result.size() * sizeof(result[0])));
        const auto wrong = std::count_if(result.begin(), result.end(), [](unsigned short x) { return std::abs(int(x) - int(ONE)) > 2; });
        std::printf("%zu elements, %zu wrong\n", result.size(), size_t(wrong));
        if (wrong) return 1;
    }
    CHECK(cuModuleUnload(module));
    CHECK(cuDevicePrimaryCtxRelease(device));
}
