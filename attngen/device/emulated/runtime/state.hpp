// What the runtime's files share: the fibers of a block, the memory a launch may touch, and the first finding.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator.hpp"

namespace emulator {

enum class Kind : int {
    NONE, OUT_OF_BOUNDS, READ_ONLY, UNINITIALIZED_SHARED, UNINITIALIZED_GLOBAL, RACE, IN_FLIGHT, MISALIGNED, DIVERGENT_BARRIER, DEADLOCK, RUNAWAY,
};

// The first thing that went wrong. Python reads this struct (see device.py).
struct Finding {
    int kind;
    int line, other_line;           // of the .cu, where a statement is known; else 0 and the address in the library follows
    uint64_t code, other_code;      // offsets into the library
    int thread, other_thread;       // linear in the block; -1: none
    unsigned block[3];
    uint64_t address;
    int bytes;
    char text[256];
};

enum class State : uint8_t { READY, AT_BLOCK_BARRIER, AT_WARP, DONE };

struct Copy { unsigned char* to; const void* from; int bytes, source_bytes; };

struct Fiber {
    Position position;
    int index, warp, lane;
    State state;
    int line;                       // where it waits
    const char* what;               // what it waits for
    unsigned mask;
    Lane lane_arguments;
    Combine combine;
    unsigned block_epoch;
    uint64_t accesses;
    void* stack_pointer;
    unsigned char *stack_low, *stack_high;
    std::vector<Copy> uncommitted;
    std::vector<std::vector<Copy>> groups;
};

struct Range {                      // one Memory of the protocol; Python writes the first four fields
    uint64_t pointer, bytes;
    int writable, reserved;
    uint64_t read, written;         // counters, in bytes
};

// Who touched two bytes of shared memory last.
struct Touch { int thread = -1; unsigned block_epoch = 0, warp_epoch = 0; const void* code = nullptr; int line = 0; };
struct Cell { Touch writer, readers[3]; int in_flight = -1; bool initialized = false; };

struct Launch {
    bool checked;
    uint64_t budget;
    Finding* finding;
    Range* ranges;
    int range_count;
    uint64_t* instruction_counts;
    uint64_t shared_read, shared_written, barriers;
    std::vector<std::vector<uint64_t>> writers;  // for each writable range: launch and thread that wrote each 2 bytes
    uint64_t sequence;
};

extern Launch launch;
extern std::vector<Fiber> fibers;
extern Fiber* current;
extern Position* running;
extern std::vector<unsigned> warp_epochs;
extern bool combining;             // a Combine runs: what it touches are the lanes' own arguments

void begin_block_memory(size_t dynamic_bytes);
void reserve_shared(size_t dynamic_bytes);

// Records the finding and leaves the block: does not return.
[[noreturn]] void report(Kind kind, const char* text, int line, const void* code, int other_line = 0, const void* other_code = nullptr,
                         int other_thread = -1, const void* address = nullptr, int bytes = 0);
[[noreturn]] void leave_block();
void switch_to_scheduler();

}  // namespace emulator
