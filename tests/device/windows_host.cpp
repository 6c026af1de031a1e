// Launches the kernel of test_other_systems.py from a library of the emulated device, as device.py does, once for each number that is
// given, and prints status, kind of the finding, how many results are wrong, and the place of the finding in the library.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <windows.h>

struct Waiter { int thread, line; uint64_t trace[16], address; char text[192]; };
struct Finding {
    int kind, line, other_line;
    uint64_t code, other_code;
    int thread, other_thread;
    unsigned block[3];
    uint64_t address;
    int bytes, waiter_count;
    uint64_t trace[16];
    Waiter waiters[8];
    char text[256];
};
struct Range { uint64_t pointer, bytes; int writable, element_bytes; const unsigned char* elements; uint64_t read, written; };
struct Stacks { unsigned char* memory; uint64_t count; };

using Kernel = void (*)(void**);
using Launch = int (*)(Kernel, void**, const unsigned*, const unsigned*, size_t, Range*, int, uint64_t seed, int mode, uint64_t budget, int first,
                       int early, uint64_t*, uint64_t*, Stacks*, Finding*);

void on_interrupt(int number) { signal(number, on_interrupt); }
DWORD WINAPI interrupt(void*) { return Sleep(300), raise(SIGINT), 0; }

int main(int count, char** arguments) {
    const HMODULE library = LoadLibraryA(arguments[1]);
    const auto launch = (Launch)(void*)GetProcAddress(library, "emulator_launch");
    const auto kernel = (Kernel)(void*)GetProcAddress(library, "attngen_call_small");
    const auto library_address = (uint64_t (*)())(void*)GetProcAddress(library, "emulator_library");
    const int mode = atoi(arguments[2]);
    signal(SIGINT, on_interrupt);
    Stacks stacks = {};
    for (int i = 3; i < count; ++i) {
        float x[64], y[64] = {};
        for (int k = 0; k < 64; ++k) x[k] = 100 * k;
        int what = atoi(arguments[i]), wrong = 0;
        const float* given = x;
        float* made = y;
        void* parameters[] = {&given, &made, &what};
        const unsigned grid[] = {1, 1, 1}, block[] = {64, 1, 1};
        Range ranges[] = {{(uint64_t)x, sizeof(x), 0, 0, nullptr, 0, 0}, {(uint64_t)y, sizeof(y), 1, 0, nullptr, 0, 0}};
        uint64_t instructions[8] = {}, totals[3] = {};
        Finding finding;
        if (what == 9) CloseHandle(CreateThread(nullptr, 0, interrupt, nullptr, 0, nullptr));
        const int status = launch(kernel, parameters, grid, block, 0, ranges, 2, 1, mode, 1ull << 60, 1, 0, instructions, totals, &stacks, &finding);
        for (int k = 0; k < 64; ++k) wrong += y[k] != 100 * (63 - k) + (k ^ 1) + 7;
        const uint64_t code = finding.code ? finding.code - library_address() : 0;
        printf("%d: %d %d %d %llu\n", what, status, finding.kind, wrong, (unsigned long long)code);
        fflush(stdout);
    }
}
